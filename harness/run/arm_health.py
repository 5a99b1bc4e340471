"""What health monitors find while an arm runs: what ranks log of their own steps, the devices of
its machines, and injected reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.arm.emulated_devices import EmulatedDevices
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.arm.roster import ArmRoster
from trainchaos.harness.launch.launcher import ArmSetup, Cluster
from trainchaos.recovery.health.checks import Answer, Checker
from trainchaos.recovery.health.job_watch import job_service
from trainchaos.recovery.health.reputation import Care, PlaceCare
from trainchaos.recovery.health.service import HealthService, device_detectors
from trainchaos.recovery.health.signs import ReportFile, Sign
from trainchaos.recovery.health.taints import TaintList, taints_path
from trainchaos.recovery.supervise.job_health import JobHealth

NS = 1e9


class ArmChecks:
    """What ``checker`` finds, beside what faults have made of ``devices``."""

    def __init__(self, checker: Checker, devices: EmulatedDevices) -> None:
        self._checker, self._devices = checker, devices
        self.begin, self.close = checker.begin, checker.close

    def take(self) -> Sequence[Answer]:
        return [
            Answer(found.spot, False, "an injected fault: unfit", emulated=True)
            if self._devices.unfit(*found.spot)
            else found
            for found in self._checker.take()
        ]


class HealthScene(Scene, Protocol):
    """The arm, whose health source and devices are there."""

    health: ReportFile
    devices: EmulatedDevices


class ArmHealth(JobHealth):
    """The monitors of one arm. Simulated ranks are watched on their own clock, between two turns,
    so that the same seed finds the same; real ones by a thread.
    """

    def __init__(
        self,
        setup: ArmSetup,
        cluster: Cluster,
        scene: HealthScene,
        roster: ArmRoster,
    ) -> None:
        spec, wanted = setup.cell.scenario.workload, setup.cell.scenario.health
        self._scene, self._simulated = scene, cluster.simulated
        # Both are told of faults and read by the orchestrator's own thread.
        self._devices = HealthService(
            [scene.devices] if scene.devices.reads else [],
            device_detectors(),
            clock_s=lambda: cluster.now_ns() / NS,
        )
        self._job, _ = job_service(
            setup.run.events(setup.id),
            shards=spec.shards,
            steps=spec.steps,
            clock_s=lambda: cluster.now_ns() / NS,
        )
        checker = ArmChecks(cluster.checker(), scene.devices) if wanted.preflight_rejoins else None
        real = wanted.taint_alarms and not cluster.simulated
        care = PlaceCare(
            Care(checker=checker, taints=TaintList(taints_path()) if real else None),
            roster,
            roster.reputation,
            scene.record,
            lambda: cluster.now_ns() / NS,
            cluster.taint_name,
        )
        sources = [
            self._read,
            cluster.hardware,
            scene.health.read,
            self._devices.take,
            self._job.take,
        ]
        super().__init__(care, scene.record, scene.process_of, sources)

    def start(self) -> None:
        if not self._simulated:
            self._job.start()

    def _read(self) -> Iterable[Sign]:
        """Read what no thread reads, and record what faults report."""
        if self._simulated:
            self._job.look()
        self._devices.look()
        for one in self._scene.devices.said():
            self._record(Kind.HEALTH_REPORTED, **one._asdict(), source="injected")
        return ()

    def close(self) -> None:
        """End the threads, and checks of places. Safe to repeat."""
        self._job.close()
        self._care.close()
