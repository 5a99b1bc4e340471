"""Writes down how short of processors the machine of an arm is while it trains, for who judges its rates.

Of the machine: for how long somebody has wanted a processor in vain (/proc/pressure/cpu), and what its hypervisor took
(/proc/stat, steal). Of each rank's training thread: how long it ran and how long it stood in a run queue
(/proc/PID/schedstat). All are counts since some beginning: only differences mean anything. What the kernel does not say
is left out. Nothing is read while the job is not training: a recovery pays for none of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from chaos.events import Event, Kind
from recovery.supervision import Stage

EVERY_S = 0.4
MOST_RANKS = 8
"""Of which the run queue is read: a reading takes at most 0.4 ms, and ranks of one machine share its fate."""
STEAL_COSTS_S = 0.1e-3
SELDOM = 10
"""On a machine with many processors /proc/stat takes long; it is then read with one reading of so many."""
NS = 1e9
HEAD = 256


class Scene(Protocol):
    """The arm."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later, if the arm still runs then."""

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event."""


@runtime_checkable
class OnThisMachine(Protocol):
    """Of a cluster whose processes are all of this machine: their pids."""

    pids: Mapping[str, int]


@dataclass(kw_only=True)
class Reader:
    """``root``: of the machine's /proc; ``used_s``: processor time of this thread so far."""

    root: Path = Path("/proc")
    used_s: Callable[[], float] = time.thread_time
    ticks: int = field(default_factory=lambda: os.sysconf("SC_CLK_TCK"))
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    _count: int = 0
    _steal_every: int = 1

    def read(self, pids: Mapping[str, int]) -> dict[str, Any] | None:
        """What ``pressure_read`` holds of these processes; None where the kernel says nothing at all."""
        ranks = {}
        for name, pid in islice(pids.items(), MOST_RANKS):
            with suppress(OSError, ValueError):  # it may end just now
                ran, queued, _ = self._head(f"{pid}/schedstat").split()
                ranks[name] = [round(int(ran) / NS, 4), round(int(queued) / NS, 4)]
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
        return {"cpus": self.cpus, "some_s": some_s, "steal_s": steal_s, "ranks": ranks}

    def _head(self, name: str) -> str:
        with open(self.root / name, "rb", buffering=0) as stream:
            return bytes(stream.read(HEAD)).decode("ascii", "replace")


def follow(scene: Scene, training: Callable[[], Mapping[str, int]], reader: Reader | None = None) -> None:
    """Read now and again from now on. ``training``: the ranks that train just now, rank 0 first, with their pids;
    none of them while the job is doing anything else."""
    read = (reader or Reader()).read

    def look() -> None:
        pids = training()
        found = read(pids) if pids else None
        if found is not None:
            scene.record(Kind.PRESSURE_READ, **found)
        scene.later(EVERY_S, look)

    scene.later(0.0, look)


class Supervisor(Protocol):
    """See recovery.controller.Controller."""

    stage: Stage

    @property
    def members(self) -> tuple[str, ...]:
        """Of the generation, rank by rank."""


class Supervised(Scene, Protocol):
    """The arm of a built-in workload."""

    @property
    def controller(self) -> Supervisor:
        """Of now."""


def follow_built_in(scene: Supervised, cluster: object) -> None:
    """The same, where the ranks of a cluster are of this machine; of others nothing is recorded."""
    if not isinstance(cluster, OnThisMachine):
        return
    pids = cluster.pids

    def training() -> Mapping[str, int]:
        now = scene.controller
        return {n: pids[n] for n in now.members if n in pids} if now.stage is Stage.TRAINING else {}

    follow(scene, training)
