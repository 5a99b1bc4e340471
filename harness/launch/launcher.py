"""What a launcher offers: the processes of one arm, messages to and from them, their progress
marks, and a clean end.

A launcher is one file in ``harness/launchers``: a pydantic model of its YAML parameters. Its
``session`` lasts for a whole run and makes one ``Cluster`` per arm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.fault.targets import LinkShape, StorageTarget
from trainchaos.chaos.scenario.model import Cell
from trainchaos.chaos.schedule.blast import NO_COSTS, Privilege
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.places.seats import Tainted
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.harness.undo.base import Undo
from trainchaos.recovery.health.checks import Checker
from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.process.host import Host
from trainchaos.recovery.supervise.keeper_log import KeeperControl


@dataclass(frozen=True, kw_only=True)
class ArmSetup:
    """One arm to run: which cell, which repeat, faulted or control, and where its files go.

    ``token``: the run's random id, with which each log begins; empty: none has one.
    """

    id: str
    cell: Cell
    repeat: int
    arm: Literal["faulted", "control"]
    seed: int
    run: RunDirectory
    data: DataInfo
    token: str = ""

    @property
    def checkpoints(self) -> Path:
        """Checkpoint directory of the arm."""
        return self.run.checkpoints(self.id)


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What is still there after ``close``; all lists should be empty."""

    processes: list[dict[str, Any]]
    ports: list[int]
    shared_memory: list[str]


class LinkControl(Protocol):
    """Shapes directed links between processes, named by source and destination, and
    measures them.
    """

    def refuses(self, link: tuple[str, str]) -> str | None:
        """Why a link cannot be shaped; None when it can."""
        return None

    def over(self, link: tuple[str, str]) -> tuple[str, str]:
        """The link that carries this one: itself, or a link shared by all processes of the two
        nodes.
        """
        return link

    def shape(self, links: Sequence[tuple[str, str]], shape: LinkShape) -> str:
        """Shape the links from now on; returns the mechanism used."""

    def probe(self, link: tuple[str, str]) -> int:
        """Start to measure a link with bytes of an uninvolved client; returns the probe's
        number.
        """

    def probed(self, number: int) -> Mapping[str, Any] | None:
        """``round_trip_s`` and ``mbit_per_s`` (None: nothing arrived), once measured."""


class StoreControl(Protocol):
    """The process that holds the key-value store; see chaos.fault.targets.StoreTarget."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd."""

    def set_latency(self, seconds: float) -> None:
        """Delay every request."""

    def ended(self) -> Mapping[str, Any] | None:
        """How the store that was signalled last ended (``reaped_signal``, ``next_port``), once it
        is reaped.
        """

    def round_trip_s(self) -> float | None:
        """Measured time of one request of an uninvolved client, once it has been answered."""


class GroupControl(Protocol):
    """Limits the resources of processes, in one group per process or one per node."""

    def undo(self, process: str) -> Sequence[Undo]:
        """The records by which any process can remove this process's groups."""

    def limit_memory(self, process: str, mib: int) -> None:
        """Cap memory at current usage plus ``mib``; beyond that it is killed. Raises OSError."""

    def oom_kills(self, process: str) -> int:
        """How many processes were killed by the memory limit."""

    def limit_cores(self, processes: Sequence[str], cores: float) -> None:
        """Limit everything on their node to ``cores`` of processor time. Raises OSError."""

    def throttled(self, process: str) -> int:
        """In how many periods the processor limit throttled it."""

    def release(self, process: str) -> None:
        """Lift all limits; safe to repeat. Raises OSError."""


class MachineControl(Protocol):
    """Acts on whole nodes, by number. Everything except ``kill`` can be undone; undoing is safe to
    repeat.
    """

    can_pause: bool
    """Whether nodes can be paused as a whole; otherwise their processes are stopped."""

    def kill(self, node: int) -> Mapping[str, Any]:
        """End the node at once, with everything on it; returns what was done, for the log. Raises
        OSError.
        """

    def pause(self, node: int) -> None:
        """Let nothing on the node run."""

    def resume(self, node: int) -> None:
        """Undo ``pause``."""

    def limit_memory(self, node: int, spare_mib: int | None) -> None:
        """Cap its memory at current usage plus ``spare_mib`` (None: no limit)."""

    def limit_cores(self, node: int, cores: float | None) -> None:
        """Limit its processor time to ``cores`` (None: no limit)."""

    def isolate(self, node: int, *, outward: bool = True, inward: bool = True) -> None:
        """Drop all packets between it and the other nodes and the coordinator, in these
        directions.
        """

    def rejoin(self, node: int) -> None:
        """Undo ``isolate``."""

    def seen(self, node: int) -> Mapping[str, Any]:
        """The platform's own view of the node, as evidence: ``state`` (``running``, ``paused``,
        ``exited`` ...), ``machine`` (changes when the node starts anew), ``oom_kills`` and
        ``throttled`` (counts since then) ...
        """


class FaultSurface(Protocol):
    """What faults touch beside processes; None where an arm has none of it."""

    @property
    def links(self) -> LinkControl | None:
        """Shapes connections between ranks, if the arm's faults need it."""

    @property
    def groups(self) -> GroupControl | None:
        """Limits on memory and processors, if the arm's faults need them."""

    @property
    def store(self) -> StoreControl | None:
        """The key-value store, if it is a separate process; the port changes when another takes
        over.
        """

    @property
    def machines(self) -> MachineControl | None:
        """Acts on nodes as a whole, where nodes are more than names."""

    @property
    def storage(self) -> StorageTarget | None:
        """The arm's own file system for checkpoints, if it has one."""


class Cluster(Host, FaultSurface, Protocol):
    """The processes of one arm, and what faults touch there."""

    @property
    def store_port(self) -> int:
        """Port of the key-value store now."""

    @property
    def keepers(self) -> KeeperControl | None:
        """Keepers of in-memory checkpoints, if the cell has them."""

    def checker(self) -> Checker:
        """Finds out whether places are fit, on their machines. Whoever asks for it closes it."""

    def taint_name(self, node: int) -> str:
        """By which name a taint means a node of the arm, and no other of its nodes."""

    @property
    def simulated(self) -> bool:
        """Whether its processes and its clock exist in memory only."""

    @property
    def tainted(self) -> Tainted:
        """Places where processes start only if there are no others."""

    def identity(self) -> dict[str, Any]:
        """The orchestrator's ``pid``, ``host`` and ``wall_ns`` (Unix time now)."""

    def undo(self, name: str, pid: int) -> Undo | None:
        """The record by which any process can remove a process spawned here; None if it is not a
        real one.
        """

    def hardware(self) -> Sequence[Sign]:
        """Reports of the machine's own monitors since the last call."""

    def away(self) -> None:
        """The coordinator is lost: other machines cannot reach it."""

    def back(self) -> None:
        """Another coordinator has taken over."""

    def close(self) -> Leftovers:
        """Kill and reap everything of this arm; returns what could not be removed."""


class Stopped(Exception):
    """The run was ordered to end during a wait."""


class Session(Protocol):
    """A launcher in use for one run."""

    def cluster(self, setup: ArmSetup, stopped: Callable[[], bool] = lambda: False) -> Cluster:
        """Prepare for one arm. Raises InfrastructureError; Stopped if ``stopped`` turns true during
        the wait.
        """


class Launcher(BaseModel):
    """Base of a launcher; its fields are its YAML parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    emulates: ClassVar[str] = ""
    """What is emulated under this launcher, for every report; empty if everything is real."""

    simulates: ClassVar[bool] = False
    """Whether nothing is real: every verdict says so."""

    offers: ClassVar[frozenset[Need]] = frozenset()
    """Needs of faults that this launcher can meet, given the privileges."""

    real: ClassVar[frozenset[Need]] = frozenset()
    """The needs met by the real thing, which make a fault real that is emulated elsewhere."""

    costs: ClassVar[Mapping[Need, Privilege]] = NO_COSTS
    """The privilege that a need takes here, if it differs from the usual one
    (``chaos.schedule.blast``).
    """

    @abstractmethod
    def session(self, cells: Sequence[Cell], run: RunDirectory) -> AbstractContextManager[Session]:
        """Open the launcher for one run. ``cells``: all cells of the run. Raises
        InfrastructureError.
        """

    def check(self, cell: Cell) -> None:
        """Raise ScenarioError, with a hint, if a cell can never work here, whatever resources are
        free.
        """

    def lacks(self, need: Need) -> str | None:
        """Why an offered need cannot be met on this machine now; None if it can."""
        return None

    def missing(self, cell: Cell) -> str | None:
        """What this launcher lacks for a cell, or None."""
        return None
