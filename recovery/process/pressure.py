"""How short of CPU a machine and the processes on it are, by the kernel's counters.

Of the machine: for how long some process wanted a CPU and had none (/proc/pressure/cpu), and what
its hypervisor took (/proc/stat, steal). Of each process: how long its first thread ran and how long
it was in a run queue (/proc/PID/schedstat). All counters have an arbitrary start: only differences
mean anything. Figures that the kernel does not provide are left out.
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
"""Processes whose run queue is read: a reading takes at most 0.4 ms, and ranks of one machine share
its fate.
"""
STEAL_COSTS_S = 0.1e-3
SELDOM = 10
"""On a machine with many CPUs /proc/stat takes long; it is then read only with one reading in that
many.
"""
NS = 1e9
HEAD = 256


@dataclass(frozen=True, kw_only=True)
class PressureReading:
    """``cpus`` of the machine; ``some_s``: some process wanted a CPU and had none; ``steal_s``:
    taken by the hypervisor, over all ``cpus``; None where unknown. ``ranks``: process -> seconds
    that it ran, and that it was in a queue.
    """

    cpus: int
    some_s: float | None
    steal_s: float | None
    ranks: dict[str, tuple[float, float]]


@dataclass(kw_only=True)
class PressureReader:
    """``root``: of the machine's /proc; ``used_s``: CPU time of this thread so far."""

    root: Path = Path("/proc")
    used_s: Callable[[], float] = time.thread_time
    ticks: int = field(default_factory=lambda: os.sysconf("SC_CLK_TCK"))
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    _count: int = 0
    _steal_every: int = 1

    def read(self, pids: Mapping[str, int]) -> PressureReading | None:
        """A reading of these processes, by name; None where the kernel provides nothing at all."""
        ranks: dict[str, tuple[float, float]] = {}
        for name, pid in islice(pids.items(), MOST_RANKS):
            with suppress(OSError, ValueError):  # it may exit during the read
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
        return PressureReading(cpus=self.cpus, some_s=some_s, steal_s=steal_s, ranks=ranks)

    def _head(self, name: str) -> str:
        with open(self.root / name, "rb", buffering=0) as stream:
            return bytes(stream.read(HEAD)).decode("ascii", "replace")
