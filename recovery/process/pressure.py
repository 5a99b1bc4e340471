"""How short of processors a machine and the processes on it are, as its kernel counts it.

Of the machine: for how long somebody has wanted a processor in vain (/proc/pressure/cpu), and what
its hypervisor took (/proc/stat, steal). Of each process: how long its first thread ran and how long
it stood in a run queue (/proc/PID/schedstat). All are counts since some beginning: only differences
mean anything. What the kernel does not say is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

EVERY_S = 0.4
MOST_RANKS = 8
"""Of which the run queue is read: a reading takes at most 0.4 ms, and ranks of one machine share
its fate.
"""
STEAL_COSTS_S = 0.1e-3
SELDOM = 10
"""On a machine with many processors /proc/stat takes long; it is then read with one reading of so
many.
"""
NS = 1e9
HEAD = 256


@dataclass(frozen=True, kw_only=True)
class Reading:
    """``cpus`` of the machine; ``some_s``: somebody wanted one in vain; ``steal_s``: taken by the
    hypervisor, over all ``cpus``; None where that is not known. ``ranks``: process -> seconds that
    it ran, and that it stood in a queue.
    """

    cpus: int
    some_s: float | None
    steal_s: float | None
    ranks: dict[str, tuple[float, float]]


@dataclass(kw_only=True)
class Reader:
    """``root``: of the machine's /proc; ``used_s``: processor time of this thread so far."""

    root: Path = Path("/proc")
    used_s: Callable[[], float] = time.thread_time
    ticks: int = field(default_factory=lambda: os.sysconf("SC_CLK_TCK"))
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    _count: int = 0
    _steal_every: int = 1

    def read(self, pids: Mapping[str, int]) -> Reading | None:
        """Of these processes, by name; None where the kernel says nothing at all."""
        ranks: dict[str, tuple[float, float]] = {}
        for name, pid in islice(pids.items(), MOST_RANKS):
            with suppress(OSError, ValueError):  # it may end just now
                ran, queued, _ = self._head(f"{pid}/schedstat").split()
                ranks[name] = (round(int(ran) / NS, 4), round(int(queued) / NS, 4))
        some_s = steal_s = None
        with suppress(OSError, ValueError, IndexError):
            some_s = int(self._head("pressure/cpu").split("total=", 1)[1].split(None, 1)[0]) / 1e6
        if self._count % self._steal_every == 0:
            began = self.used_s()
            with suppress(OSError, ValueError, IndexError):
                steal_s = int(self._head("stat").split("\n", 1)[0].split()[8]) / self.ticks
            self._steal_every = SELDOM if self.used_s() - began > STEAL_COSTS_S else 1
        self._count += 1
        if not ranks and some_s is None and steal_s is None:
            return None
        return Reading(cpus=self.cpus, some_s=some_s, steal_s=steal_s, ranks=ranks)

    def _head(self, name: str) -> str:
        with open(self.root / name, "rb", buffering=0) as stream:
            return bytes(stream.read(HEAD)).decode("ascii", "replace")
