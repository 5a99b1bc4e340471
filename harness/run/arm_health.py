"""What health monitors find while an arm runs: recorded, and where it announces a failure, told to
the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.arm.fault_context import RecordEvent
from trainchaos.harness.launch.launcher import ArmSetup, Cluster
from trainchaos.harness.run.coordinator import Coordinator
from trainchaos.harness.run.scene import BuiltInScene
from trainchaos.recovery.health.job_watch import job_service
from trainchaos.recovery.health.readings.signs import Sign, event_of
from trainchaos.recovery.health.service import HealthService, device_detectors
from trainchaos.recovery.health.warnings import PlaceWarnings

NS = 1e9


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
        self._warnings = PlaceWarnings(scene)
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
            self._warnings.heard(sign)
        self._warnings.tell(coordinator.supervise)

    def close(self) -> None:
        """End the thread. Safe to repeat."""
        self._job.close()

    def _found(self) -> Iterator[Sign]:
        yield from self._cluster.hardware()
        yield from self._scene.health.read()
        yield from self._devices.take()
        yield from self._job.take()
