"""A fault's access to a simulated rank's heartbeat marks and wall clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainchaos.harness.sim.world.clock import NS_PER_S

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank


class SimSigns:
    """Implements ``chaos.fault.targets.Signs``."""

    def __init__(self, job: SimRank, wanted: Callable[[str, Any], list[Any]]) -> None:
        self._job = job
        self._wanted = wanted
        self._offset_s = 0.0

    def drop_heartbeat(self, dropped: bool) -> None:
        """See chaos.fault.targets.Signs."""
        self._job.mark.hide(bool(self._wanted("heartbeat", dropped or None)))

    def set_wall_offset(self, seconds: float) -> None:
        """See chaos.fault.targets.Signs."""
        offsets = self._wanted("clock", seconds or None)
        self._offset_s = offsets[-1] if offsets else 0.0

    def wall_ns(self) -> int:
        """See chaos.fault.targets.Signs; counted from the start of the log."""
        since_ns = self._job.process.clock.now_ns - self._job.started_ns
        return self._job.config.wall_ns + since_ns + int(self._offset_s * NS_PER_S)
