"""Limits on memory and processor time of simulated processes; see
``harness.launch.launcher.GroupControl``.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from trainchaos.harness.sim.world.clock import Clock
from trainchaos.harness.sim.world.settings import MS
from trainchaos.harness.undo.base import Undo

if TYPE_CHECKING:
    from trainchaos.harness.sim.rank.rank import SimRank

ALLOCATION_MS_PER_MIB = 0.5


class SimGroups:
    """Limits simulated processes. ``ranks``: the simulated ranks by name."""

    def __init__(self, clock: Clock, ranks: Mapping[str, SimRank]) -> None:
        self._clock = clock
        self._ranks = ranks
        self._limits: dict[str, int] = {}
        self._kills: Counter[str] = Counter()

    def undo(self, process: str) -> Sequence[Undo]:
        """Nothing: no change outside to undo."""
        return ()

    def limit_memory(self, process: str, mib: int) -> None:
        """The process, which is commanded to allocate at the same time, exceeds the limit after a
        while.
        """
        self._limits[process] = mib
        self._clock.after(mib * ALLOCATION_MS_PER_MIB * MS, partial(self._kill, process))

    def oom_kills(self, process: str) -> int:
        """The simulated kernel's count."""
        return self._kills[process]

    def limit_cores(self, processes: Sequence[str], cores: float) -> None:
        """Divide ``cores`` among the ranks. A rank would use one core, a keeper almost nothing."""
        ranks = [self._ranks[process] for process in processes if process in self._ranks]
        for rank in ranks:
            rank.faults.rationed = max(1.0, len(ranks) / cores)

    def throttled(self, process: str) -> int:
        """1 as soon as a limit slows it, otherwise 0."""
        return int(process in self._ranks and self._ranks[process].faults.rationed > 1)

    def release(self, process: str) -> None:
        """Lift all limits."""
        self._limits.pop(process, None)
        if process in self._ranks:
            self._ranks[process].faults.rationed = 1.0

    def _kill(self, process: str) -> None:
        one = self._ranks[process].process
        if process in self._limits and one.running and not one.stopped:
            self._kills[process] += 1
            one.signal(signal.SIGKILL)
