"""Limits on memory and processor time of simulated processes; see ``harness.launcher.GroupControl``."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from harness.sim.clock import Clock
from harness.sim.process import Process
from harness.sim.settings import MS
from harness.undoing import Undo

ALLOCATION_MS_PER_MIB = 0.5


class SimGroups:
    """``process_of``: the simulated process of a name."""

    def __init__(self, clock: Clock, process_of: Callable[[str], Process]) -> None:
        self._clock = clock
        self._process_of = process_of
        self._limits: dict[str, int] = {}
        self._kills: Counter[str] = Counter()

    def undo(self, process: str) -> Sequence[Undo]:
        """There is nothing outside to undo."""
        return ()

    def limit_memory(self, process: str, mib: int) -> None:
        """It allocates, as it is told to at the same time, until it has too much."""
        self._limits[process] = mib
        self._clock.after(mib * ALLOCATION_MS_PER_MIB * MS, partial(self._kill, process))

    def oom_kills(self, process: str) -> int:
        """The simulated kernel's count."""
        return self._kills[process]

    def release(self, process: str) -> None:
        """No limit any more."""
        self._limits.pop(process, None)

    def _kill(self, process: str) -> None:
        one = self._process_of(process)
        if process in self._limits and one.running and not one.stopped:
            self._kills[process] += 1
            one.signal(signal.SIGKILL)
