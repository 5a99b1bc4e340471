"""The process that holds the job's key-value store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import Aims, MissingTarget, OccurrenceTarget, Site
from trainchaos.harness.launch.launcher import StoreControl


class StoreSite(Site):
    """The one store of a job."""

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """The store, if it runs as its own process."""
        control = self._scene.surface.store
        if control is None:
            return [
                MissingTarget(who={"store": None}, reason="the store is no process of its own here")
            ]
        handle = StoreHandle(self._scene, control)
        return [OccurrenceTarget(target=handle, who={"store": "the job's"}, look=handle.look)]


class StoreHandle:
    """The store; see chaos.fault.targets.StoreTarget. ``look`` waits for the effect of the act."""

    def __init__(self, scene: Scene, control: StoreControl) -> None:
        self._wanted = scene.in_force
        self._control = control
        self._signalled = False

    def signal(self, signum: int) -> None:
        """Send a signal."""
        self._signalled = True
        self._control.signal(signum)

    def set_latency(self, seconds: float) -> None:
        """Delay every request; of several delays the longest applies."""
        if seconds:
            left = self._wanted.begin("latency", "store", id(self), seconds)
        else:
            left = self._wanted.end("latency", "store", id(self))
        self._control.set_latency(max(left, default=0.0))

    def round_trip_s(self) -> float | None:
        """Round trip of a client that is not part of the job."""
        return self._control.round_trip_s()

    def look(self) -> Mapping[str, Any] | None:
        """How it exited, if it was signalled, otherwise its response time."""
        if self._signalled:
            return self._control.ended()
        round_trip_s = self.round_trip_s()
        return None if round_trip_s is None else {"round_trip_s": round_trip_s}
