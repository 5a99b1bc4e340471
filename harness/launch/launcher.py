"""What a launcher offers: processes of one arm, messages to and from them, their marks, and a clean
end.

A launcher is one file in ``harness/launchers``: a pydantic model of its YAML parameters whose
``session`` lasts for a whole run and makes one ``Cluster`` for each arm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from chaos.events.log import Kind
from chaos.fault.base import Need
from chaos.fault.targets import LinkShape, StorageTarget
from chaos.scenario.model import Cell
from chaos.schedule.blast import NO_COSTS, Privilege
from harness.host.rundir import RunDirectory
from harness.launch.health import HealthReport
from harness.launch.workload import DataInfo
from harness.undo.base import Undo
from recovery.checkpoint.memory.keepers import Started as KeeperStarted
from recovery.process.local import Exited, Report, Said
from recovery.process.starvation import Pulse
from recovery.transport.progress_counters import Mark
from recovery.transport.wire import Message

__all__ = [
    "ArmSetup",
    "Cluster",
    "Exited",
    "KeeperControl",
    "KeeperStarted",
    "Launcher",
    "Leftovers",
    "MachineControl",
    "NodeNews",
    "Report",
    "Said",
    "Session",
]


@dataclass(frozen=True, kw_only=True)
class ArmSetup:
    """One arm to run: which cell, which repeat, faulted or control, and where its files go."""

    id: str
    cell: Cell
    repeat: int
    arm: Literal["faulted", "control"]
    seed: int
    run: RunDirectory
    data: DataInfo

    @property
    def checkpoints(self) -> Path:
        """Checkpoint directory of the arm."""
        return self.run.checkpoints(self.id)


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """What is still there after ``close``; all empty is good."""

    processes: list[dict[str, Any]]
    ports: list[int]
    shared_memory: list[str]


class LinkControl(Protocol):
    """Shapes directed links between processes, named by source and destination, and
    measures them.
    """

    def refuses(self, link: tuple[str, str]) -> str | None:
        """Why a link cannot be shaped; None when it can."""

    def over(self, link: tuple[str, str]) -> tuple[str, str]:
        """What a link leads over: itself, or one that other processes of the same nodes share with
        it.
        """

    def shape(self, links: Sequence[tuple[str, str]], shape: LinkShape) -> str:
        """Shape them from now on; by what means."""

    def probe(self, link: tuple[str, str]) -> int:
        """Begin to measure a link with bytes of an uninvolved client; returns the probe's
        number.
        """

    def probed(self, number: int) -> Mapping[str, Any] | None:
        """``round_trip_s`` and ``mbit_per_s`` (None: nothing came through), once measured."""


class StoreControl(Protocol):
    """The process that holds the key-value store; see chaos.fault.targets.StoreTarget."""

    def signal(self, signum: int) -> None:
        """Send a signal through the held pidfd."""

    def set_latency(self, seconds: float) -> None:
        """Delay every request."""

    def ended(self) -> Mapping[str, Any] | None:
        """How the store ended that was signalled last (``reaped_signal``, ``next_port``), once it
        is reaped.
        """

    def round_trip_s(self) -> float | None:
        """Measured time of one request of an uninvolved client, once it was answered."""


class GroupControl(Protocol):
    """Limits what processes take: each in a group of its own, or all of a node in the node's."""

    def undo(self, process: str) -> Sequence[Undo]:
        """The records by which anybody can remove the groups of a process."""

    def limit_memory(self, process: str, mib: int) -> None:
        """Let it have that much more than it has; beyond that it is killed. Raises OSError."""

    def oom_kills(self, process: str) -> int:
        """How many processes were killed for it."""

    def limit_cores(self, processes: Sequence[str], cores: float) -> None:
        """Let all that runs on their node have so much processor time, in cores. Raises OSError."""

    def throttled(self, process: str) -> int:
        """In how many periods it was kept waiting for that."""

    def release(self, process: str) -> None:
        """Take all limits away; safe to repeat. Raises OSError."""


class MachineControl(Protocol):
    """Acts on whole nodes, by number. Everything but ``kill`` can be undone, twice as well
    as once.
    """

    @property
    def can_pause(self) -> bool:
        """Whether nodes can be paused as a whole; elsewhere their processes are stopped."""

    def kill(self, node: int) -> Mapping[str, Any]:
        """End the node at once, with all that runs there; what was done, for the log. Raises
        OSError.
        """

    def pause(self, node: int) -> None:
        """Let nothing on it run."""

    def resume(self, node: int) -> None:
        """Undo ``pause``."""

    def limit_memory(self, node: int, spare_mib: int | None) -> None:
        """Let it have so much more memory than it uses now (None: as much as it likes)."""

    def limit_cores(self, node: int, cores: float | None) -> None:
        """Let it have so much processor time (None: as much as there is)."""

    def isolate(self, node: int, *, outward: bool = True, inward: bool = True) -> None:
        """Drop all packets between it and the other nodes, and the coordinator, in these
        directions.
        """

    def rejoin(self, node: int) -> None:
        """Undo ``isolate``."""

    def seen(self, node: int) -> Mapping[str, Any]:
        """What the platform itself says of it now, as evidence: ``state`` (``running``, ``paused``,
        ``exited`` ...), ``machine`` (another one once it has begun anew), ``oom_kills`` and
        ``throttled`` (counts since then) ...
        """


@dataclass(frozen=True, kw_only=True)
class NodeNews:
    """An event of a node to be recorded: ``NODE_JOINED``, ``NODE_LOST`` or ``CLOCK_MEASURED`` with
    its ``data``.
    """

    kind: Kind
    data: Mapping[str, Any]


class KeeperControl(Protocol):
    """The keepers of checkpoints in memory, one a node; see ``recovery.checkpoint.memory``."""

    def look(self) -> Sequence[KeeperStarted | Exited]:
        """Starts and ends since the last look; who ended has a successor."""

    def keeper_of(self, node: int) -> str:
        """Its process's name now."""

    def signal(self, process: str, signum: int) -> None:
        """Signal one; one already gone is no error."""

    def os_state(self, process: str) -> str:
        """As of a rank."""

    def end(self) -> Sequence[Exited]:
        """Kill all and wait for their ends."""


class Cluster(Protocol):
    """The processes of one arm."""

    def places_on(self, node: int) -> Sequence[str]:
        """A node's devices, or emulated slots (``cpu:0`` ...) where there are none."""

    def usable(self) -> Collection[int]:
        """Nodes on which a process can be started now."""

    @property
    def groups(self) -> GroupControl | None:
        """Limits on memory, if the arm's faults need them."""

    @property
    def store_port(self) -> int:
        """Where ranks find the key-value store now."""

    @property
    def store(self) -> StoreControl | None:
        """The key-value store, if it is a process of its own; ``store_port`` changes when another
        takes over.
        """

    @property
    def links(self) -> LinkControl | None:
        """What shapes connections between ranks, if the arm's faults need it."""

    @property
    def machines(self) -> MachineControl | None:
        """Acts on nodes as a whole, where they are more than names."""

    @property
    def keepers(self) -> KeeperControl | None:
        """Of checkpoints in memory, if the cell has them."""

    @property
    def storage(self) -> StorageTarget | None:
        """The file system of their own that the arm's checkpoints are on, if they are."""

    def identity(self) -> dict[str, Any]:
        """Of the orchestrator: ``pid``, ``host`` and ``wall_ns`` (Unix time now)."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds; simulated by a simulator."""

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        """Start a process on one of ``places_on(node)`` and return its pid. Raises
        InfrastructureError, ConnectionError when its node is lost just now.
        """

    def undo(self, name: str, pid: int) -> Undo | None:
        """The record by which anybody can get rid of a process it has spawned; None: there is no
        real one.
        """

    def news(self) -> Sequence[NodeNews]:
        """What became known of nodes since the last call; in a new arm first of all that
        are there.
        """

    def hardware(self) -> Sequence[HealthReport]:
        """What the machine's own monitors reported since the last call."""

    def send(self, name: str, message: Message) -> bool:
        """Send a message; False when the process is gone."""

    def signal(self, name: str, signum: int) -> None:
        """Signal a process through its held pidfd; one already gone is no error."""

    def mark(self, name: str) -> Mark:
        """A process's progress mark; readable after its death too."""

    def os_state(self, name: str) -> str:
        """R, S, D, T, Z, or X when gone."""

    def pulse(self, name: str) -> Pulse:
        """What a process got of the processors."""

    def wait(self, timeout_s: float) -> list[Report]:
        """What happened; waits up to ``timeout_s`` for something to."""

    def away(self) -> None:
        """The coordinator is lost: nobody on another machine reaches it."""

    def back(self) -> None:
        """Another coordinator is there."""

    def close(self) -> Leftovers:
        """Kill and reap everything of this arm; says what could not be removed."""


class Stopped(Exception):
    """The run was told to end while something was waited for."""


class Session(Protocol):
    """A launcher in use for one run."""

    def cluster(self, setup: ArmSetup, stopped: Callable[[], bool] = lambda: False) -> Cluster:
        """Make ready for one arm. Raises InfrastructureError; Stopped, if it takes long and
        ``stopped`` meanwhile.
        """


class Launcher(BaseModel):
    """Base of a launcher; its fields are its YAML parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    emulates: ClassVar[str] = ""
    """What is not real under this launcher, for every report; empty: nothing."""

    offers: ClassVar[frozenset[Need]] = frozenset()
    """What faults may need and this launcher can do, given the privileges."""

    real: ClassVar[frozenset[Need]] = frozenset()
    """What of it is the thing itself, and makes a fault real that is emulated elsewhere."""

    costs: ClassVar[Mapping[Need, Privilege]] = NO_COSTS
    """The privilege that a need takes here, where it is not the usual one
    (``chaos.schedule.blast``).
    """

    @abstractmethod
    def session(self, cells: Sequence[Cell], run: RunDirectory) -> AbstractContextManager[Session]:
        """Open the launcher for one run. ``cells``: all that it will play. Raises
        InfrastructureError.
        """

    def check(self, cell: Cell) -> None:
        """Raise ScenarioError when a cell cannot work here whatever the machine has free, with what
        would work.
        """

    def lacks(self, need: Need) -> str | None:
        """Why something it offers cannot be done on this machine now; None when it can."""
        return None

    def missing(self, cell: Cell) -> str | None:
        """What this launcher lacks for a cell, or None."""
        return None
