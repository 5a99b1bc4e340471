"""What a fault injector and its sites may see and touch of an arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from chaos.events.log import Event, Kind
from chaos.fault.targets import StorageTarget
from harness.arm.in_force import InForce
from harness.launch.health import HealthSource
from harness.launch.launcher import (
    ArmSetup,
    GroupControl,
    LinkControl,
    MachineControl,
    StoreControl,
)
from harness.undo.ledger import Ledger
from recovery.transport.wire import Message


class Record(Protocol):
    """Writes an event of an arm."""

    def __call__(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write it."""


class Scene(Protocol):
    """What the injector may see and do of the arm that it acts on."""

    setup: ArmSetup
    ledger: Ledger
    in_force: InForce

    @property
    def has_coordinator(self) -> bool:
        """Whether somebody supervises the job now."""

    def lose_coordinator(self, down_s: float) -> None:
        """Whoever supervises the job forgets everything; another takes over ``down_s`` seconds
        later.
        """

    @property
    def store(self) -> StoreControl | None:
        """The key-value store, if it is a process of its own."""

    @property
    def links(self) -> LinkControl | None:
        """What shapes connections between ranks, if the arm's faults need it."""

    @property
    def machines(self) -> MachineControl | None:
        """Acts on nodes as a whole, where they are more than names."""

    @property
    def storage(self) -> StorageTarget | None:
        """The file system of the checkpoints, if they have one of their own."""

    @property
    def groups(self) -> GroupControl | None:
        """Limits on memory, if the arm's faults need them."""

    @property
    def health(self) -> HealthSource | None:
        """The source that monitors read, if anybody reads one."""

    def node_of(self, process: str) -> int | None:
        """The node a process of the arm was placed on."""

    def device_of(self, process: str) -> str | None:
        """The device a process was started on, if known."""

    def now_ns(self) -> int:
        """Clock of the arm."""

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event of the orchestrator."""

    def send(self, process: str, message: Message) -> bool:
        """Send to a rank."""

    def signal(self, process: str, signum: int) -> None:
        """Signal a process of the run."""

    def os_state(self, process: str) -> str:
        """The kernel's word on it."""

    def process_of(self, rank: int) -> str | None:
        """Who holds a rank now."""

    def spare(self, index: int) -> str | None:
        """Who waits as spare number ``index``."""

    def on_node(self, node: int) -> list[str]:
        """The living processes of a node."""

    def refuse_device(self, process: str) -> str:
        """Let nobody start any more on a process's device, and name it. Raises RuntimeError where
        that cannot be.
        """

    def accept_device(self, process: str) -> None:
        """Let processes start there again."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something done ``delay_s`` seconds from now, if the arm still runs then."""
