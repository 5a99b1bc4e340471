"""The processes of a job, wherever they run: what is done to them by name, and what they report.

Three hosts: processes of this machine (``recovery.process.local``), processes of nodes with agents
(``recovery.nodes.host``), and simulated ones (``harness.sim.cluster``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Message


@dataclass(frozen=True, kw_only=True)
class MessageReceived:
    """A process sent a message."""

    process: str
    message: Any


@dataclass(frozen=True, kw_only=True)
class Exited:
    """A process has exited: exit code or signal, the other None. ``time_ns``: when it was
    noticed.
    """

    process: str
    exit_code: int | None
    signal: int | None
    time_ns: int

    @property
    def how(self) -> str:
        """For people: ``signal 9`` or ``exit code 1``."""
        return f"signal {self.signal}" if self.signal is not None else f"exit code {self.exit_code}"


@dataclass(frozen=True, kw_only=True)
class Dying:
    """A process will exit in a moment, and trains no more; how it ends is not known yet. A hint: it
    comes before the exit, or not at all when the exit is noticed first.
    """

    process: str


Report = MessageReceived | Dying | Exited


@dataclass(frozen=True, kw_only=True)
class NodeNews:
    """A node's event, to be recorded: ``NODE_JOINED``, ``NODE_LOST`` ... with its ``data``."""

    kind: Kind
    data: Mapping[str, Any]


class ProcessStates(Protocol):
    """What can be seen of processes."""

    def mark(self, name: str) -> Mark:
        """Its progress mark; readable after its death too."""

    def os_state(self, name: str) -> str:
        """R, S, D, T, Z, X if gone; ? while its node is silent."""

    def pulse(self, name: str) -> Pulse:
        """How much processor time it got."""

    def pid(self, name: str) -> int | None:
        """Its pid, where it is a process of this machine that was started here; else None."""


class Host(ProcessStates, Protocol):
    """Processes by name. An unknown name is that of a process that exited long ago."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds; simulated time in a simulator."""

    def usable(self) -> Collection[int]:
        """Nodes on which a process can be started now, preferred ones first. Raises
        InfrastructureError.
        """

    def places_on(self, node: int) -> Sequence[str]:
        """A node's devices, once for each process that it takes at first; emulated slots (``cpu:0``
        ...) where an arm has none.
        """

    def spawn(self, name: str, role: str, mode: str, device: str, node: int = 0) -> int:
        """Start a process on one of ``places_on(node)`` and return its pid. Raises
        InfrastructureError; ConnectionError if its node has just been lost.
        """

    def send(self, name: str, message: Message) -> bool:
        """Send a message; False when the process has exited or no longer reads."""

    def signal(self, name: str, signum: int) -> None:
        """Signal a process through its held pidfd; one that has exited is no error."""

    def stacks(self, name: str) -> str | None:
        """What it wrote since it was sent ``recovery.process.stacks.STACK_SIGNAL``; None: nothing
        can be read, as of a simulated one.
        """

    def wait(self, timeout_s: float) -> Sequence[Report]:
        """Reports since the last call; waits up to ``timeout_s`` for one. A process's last messages
        come before its exit.
        """

    def news(self) -> Sequence[NodeNews]:
        """Events of nodes since the last call."""


class Hands(ProcessStates, Protocol):
    """What a controller can do to the processes of its job. All calls return at once."""

    def now_s(self) -> float:
        """Monotonic seconds."""

    def spawn(self, role: str, mode: str) -> str:
        """Start a process; returns its name. Its exit or ``Ready`` is reported later."""

    def expect(self, role: str, mode: str, count: int) -> None:
        """So many calls of ``spawn`` follow at once, and may share the wait."""

    def send(self, process: str, message: Message) -> bool:
        """Send to a process; False when it has exited."""

    def kill(self, process: str) -> None:
        """SIGKILL; the exit is reported later."""

    def distrust(self, process: str) -> None:
        """A process is about to be replaced for its values: from now on start others on its device
        only where there is no other.
        """

    def ask_stacks(self, process: str) -> None:
        """Have a process write down the stacks of its threads, if it can."""

    def stacks(self, process: str) -> tuple[str, str] | None:
        """What a process wrote since it was last asked, empty if it has not answered, and the file
        in which that is kept from now on, empty if nowhere. None: it was not asked, or is unknown.
        """

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> object:
        """Write an event."""


class RecordEvent(Protocol):
    """Writes an event of a supervisor."""

    def __call__(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write it."""
