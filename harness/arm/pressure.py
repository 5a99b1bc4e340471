"""Records how short of processor time the machines of an arm are while it trains, so that its rates
can be judged.

For local ranks the harness reads (``recovery.process.pressure``), and only while the job trains, so
that a recovery does not pay for it. On nodes the agents read all the time, and the newest reading
of each node is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.process.pressure import EVERY_S, PressureReader, PressureReading
from trainchaos.recovery.supervise.supervision import Stage

MOST_NODES = 8
"""How many nodes' readings are recorded at a time."""


class PressureRecorder(Protocol):
    """What the recording needs of an arm."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action later, if the arm still runs then."""

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event."""


@runtime_checkable
class LocalProcesses(Protocol):
    """A cluster whose processes all run on this machine: their pids."""

    pids: Mapping[str, int]


@runtime_checkable
class NodePressures(Protocol):
    """A cluster whose nodes read for themselves."""

    def now_ns(self) -> int:
        """The time on the arm's clock."""

    def pressures(self) -> Mapping[int, tuple[int, PressureReading]]:
        """Node -> its newest reading and the reading's time on the arm's clock."""


def follow(
    scene: PressureRecorder,
    training: Callable[[], Mapping[str, int]],
    reader: PressureReader | None = None,
) -> None:
    """Read periodically from now on. ``training``: the pids of the ranks that train now, rank 0
    first; empty while the job does anything else.
    """
    read = (reader or PressureReader()).read

    def look() -> None:
        pids = training()
        found = read(pids) if pids else None
        if found is not None:
            scene.record(Kind.PRESSURE_READ, **asdict(found))
        scene.later(EVERY_S, look)

    scene.later(0.0, look)


class TrainingState(Protocol):
    """The controller's state that the recording reads; see
    recovery.supervise.controller.Controller.
    """

    @property
    def stage(self) -> Stage:
        """The stage of the job."""

    @property
    def generation(self) -> int:
        """The generation that trains, or did last."""

    @property
    def members(self) -> tuple[str, ...]:
        """The members of that generation, rank by rank."""


class SupervisedArm(PressureRecorder, Protocol):
    """The arm of a built-in workload."""

    @property
    def controller(self) -> TrainingState:
        """The current controller."""


def follow_built_in(scene: SupervisedArm, cluster: object) -> None:
    """As ``follow``, for ranks on this machine or on nodes; records nothing for other clusters,
    such as the simulator's.
    """
    if isinstance(cluster, LocalProcesses):
        pids = cluster.pids

        def training() -> Mapping[str, int]:
            now = scene.controller
            return (
                {n: pids[n] for n in now.members if n in pids}
                if now.stage is Stage.TRAINING
                else {}
            )

        follow(scene, training)
    elif isinstance(cluster, NodePressures):
        _follow_nodes(scene, cluster)


def _follow_nodes(scene: SupervisedArm, cluster: NodePressures) -> None:
    since: dict[int, int] = {}  # generation -> when it was first seen to train
    written: dict[int, int] = {}

    def look() -> None:
        now = scene.controller
        if now.stage is Stage.TRAINING:
            began_ns = since.setdefault(now.generation, cluster.now_ns())
            for node, (read_ns, reading) in islice(sorted(cluster.pressures().items()), MOST_NODES):
                ranks = {name: reading.ranks[name] for name in now.members if name in reading.ranks}
                if ranks and read_ns > max(began_ns, written.get(node, 0)):  # not of a recovery
                    written[node] = read_ns
                    data = {**asdict(reading), "ranks": ranks, "node": node, "read_ns": read_ns}
                    scene.record(Kind.PRESSURE_READ, **data)
        scene.later(EVERY_S, look)

    scene.later(0.0, look)
