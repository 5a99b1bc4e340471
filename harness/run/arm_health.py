"""What health monitors find while an arm runs: recorded, and where it announces a failure, told to
the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.arm.emulated_devices import EmulatedDevices
from trainchaos.harness.arm.fault_context import RecordEvent
from trainchaos.harness.launch.launcher import ArmSetup, Cluster
from trainchaos.harness.run.coordinator import Coordinator
from trainchaos.harness.run.scene import BuiltInScene
from trainchaos.recovery.health.checks import Answer, Checker
from trainchaos.recovery.health.job_watch import job_service
from trainchaos.recovery.health.reputation import NOT_OF_A_PLACE, Care, PlaceCare
from trainchaos.recovery.health.service import HealthService, device_detectors
from trainchaos.recovery.health.signs import Sign, event_of
from trainchaos.recovery.health.taints import TaintList, taints_path

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


class ArmHealth:
    """The monitors of one arm: what ranks log of their own steps, the devices of its machines, and
    injected reports. Simulated ranks are watched on their own clock, between two turns, so that the
    same seed finds the same; real ones by a thread.
    """

    def __init__(
        self, setup: ArmSetup, cluster: Cluster, scene: BuiltInScene, record: RecordEvent
    ) -> None:
        spec = setup.cell.scenario.workload
        self._cluster, self._scene, self._record = cluster, scene, record
        # Both are told of faults and read by the orchestrator's own thread.
        self._devices = HealthService(
            [scene.devices] if scene.devices.reads else [],
            device_detectors(),
            clock_s=lambda: cluster.now_ns() / NS,
        )
        wanted = setup.cell.scenario.health
        checker = ArmChecks(cluster.checker(), scene.devices) if wanted.preflight_rejoins else None
        real = wanted.taint_alarms and not cluster.simulated
        self._care = PlaceCare(
            Care(checker=checker, taints=TaintList(taints_path()) if real else None),
            scene.roster,
            scene.roster.reputation,
            record,
            lambda: cluster.now_ns() / NS,
            cluster.taint_name,
        )
        self._job, _ = job_service(
            setup.run.events(setup.id),
            shards=spec.shards,
            steps=spec.steps,
            clock_s=lambda: cluster.now_ns() / NS,
        )

    def start(self) -> None:
        """Begin to watch."""
        if not self._cluster.simulated:
            self._job.start()

    def look(self, coordinator: Coordinator) -> None:
        """Record what was found since, and warn the coordinator of what will fail."""
        if self._cluster.simulated:
            self._job.look()
        self._devices.look()
        for one in self._scene.devices.said():
            self._record(Kind.HEALTH_REPORTED, **one._asdict(), source="injected")
        for sign in self._found():
            kind, data = event_of(sign)
            self._record(kind, **data)
            holder = None if sign.rank is None else self._scene.process_of(sign.rank)
            self._care.heard(sign, holder)
        self._care.look(coordinator.supervise)

    def close(self) -> None:
        """End the threads, and checks of places. Safe to repeat."""
        self._job.close()
        self._care.close()

    def failed(self, process: str | None, cause: str, detail: str) -> None:
        """A failure was declared: its place may be suspect."""
        if process is not None and cause not in NOT_OF_A_PLACE:
            self._care.failed(process, cause, detail)

    def _found(self) -> Iterator[Sign]:
        yield from self._cluster.hardware()
        yield from self._scene.health.read()
        yield from self._devices.take()
        yield from self._job.take()
