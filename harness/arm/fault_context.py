"""What a fault injector and its sites may read and change in an arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.arm.emulated_devices import EmulatedDevices
from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.launch.launcher import ArmSetup, FaultSurface
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.health.signs import ReportFile
from trainchaos.recovery.transport.wire import Message


class Scene(Protocol):
    """What the injector may read and do in the arm that it acts on."""

    setup: ArmSetup
    ledger: Ledger
    in_force: ActiveEffects

    @property
    def surface(self) -> FaultSurface:
        """What faults touch beside processes."""

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator supervises the job now."""

    def lose_coordinator(self, down_s: float) -> None:
        """Drop the coordinator with all its state; another takes over ``down_s`` seconds later."""

    @property
    def health(self) -> ReportFile | None:
        """The health source that monitors read, if there is one."""

    @property
    def devices(self) -> EmulatedDevices | None:
        """The emulated devices that monitors read, if there are any."""

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
        """The kernel's state of a process."""

    def process_of(self, rank: int) -> str | None:
        """The process that holds a rank now."""

    def spare(self, index: int) -> str | None:
        """The process that waits as spare number ``index``."""

    def on_node(self, node: int) -> list[str]:
        """The living processes of a node."""

    def refuse_device(self, process: str) -> str:
        """Allow no further process on a process's device, and return the device's name. Raises
        RuntimeError where that is impossible.
        """

    def accept_device(self, process: str) -> None:
        """Allow processes on that device again."""

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``delay_s`` seconds, if the arm still runs then."""
