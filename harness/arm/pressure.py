"""Writes down how short of processors the machines of an arm are while it trains, for who judges
its rates.

Here the harness reads (``recovery.process.pressure``), and only while the job trains: a recovery
pays for none of it. On nodes their agents read, all the time, and the newest of each is written
down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from chaos.events.log import Event, Kind
from recovery.process.pressure import EVERY_S, Reader, Reading
from recovery.supervise.supervision import Stage

MOST_NODES = 8
"""Whose readings are written down."""


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


@runtime_checkable
class OnNodes(Protocol):
    """Of a cluster whose nodes read for themselves."""

    def now_ns(self) -> int:
        """The time on our clock."""

    def pressures(self) -> Mapping[int, tuple[int, Reading]]:
        """Node -> its newest reading, and when that was, on our clock."""


def follow(
    scene: Scene, training: Callable[[], Mapping[str, int]], reader: Reader | None = None
) -> None:
    """Read now and again from now on. ``training``: the ranks that train just now, rank 0 first,
    with their pids; none of them while the job is doing anything else.
    """
    read = (reader or Reader()).read

    def look() -> None:
        pids = training()
        found = read(pids) if pids else None
        if found is not None:
            scene.record(Kind.PRESSURE_READ, **asdict(found))
        scene.later(EVERY_S, look)

    scene.later(0.0, look)


class Supervisor(Protocol):
    """See recovery.supervise.controller.Controller."""

    @property
    def stage(self) -> Stage:
        """Where the job is."""

    @property
    def generation(self) -> int:
        """Which one trains, or did last."""

    @property
    def members(self) -> tuple[str, ...]:
        """Of the generation, rank by rank."""


class Supervised(Scene, Protocol):
    """The arm of a built-in workload."""

    @property
    def controller(self) -> Supervisor:
        """Of now."""


def follow_built_in(scene: Supervised, cluster: object) -> None:
    """The same for ranks on this machine or on nodes; of others, the simulator's, nothing is
    written down.
    """
    if isinstance(cluster, OnThisMachine):
        pids = cluster.pids

        def training() -> Mapping[str, int]:
            now = scene.controller
            return (
                {n: pids[n] for n in now.members if n in pids}
                if now.stage is Stage.TRAINING
                else {}
            )

        follow(scene, training)
    elif isinstance(cluster, OnNodes):
        _follow_nodes(scene, cluster)


def _follow_nodes(scene: Supervised, cluster: OnNodes) -> None:
    since: dict[int, int] = {}  # generation -> when it was first seen to train
    written: dict[int, int] = {}

    def look() -> None:
        now = scene.controller
        if now.stage is Stage.TRAINING:
            began_ns = since.setdefault(now.generation, cluster.now_ns())
            for node, (read_ns, reading) in islice(sorted(cluster.pressures().items()), MOST_NODES):
                ranks = {name: reading.ranks[name] for name in now.members if name in reading.ranks}
                if ranks and read_ns > max(began_ns, written.get(node, 0)):  # none of a recovery
                    written[node] = read_ns
                    data = {**asdict(reading), "ranks": ranks, "node": node, "read_ns": read_ns}
                    scene.record(Kind.PRESSURE_READ, **data)
        scene.later(EVERY_S, look)

    scene.later(0.0, look)
