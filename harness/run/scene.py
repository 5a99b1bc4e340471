"""What the injector may read and change in an arm of built-in ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trainchaos.chaos.fault.targets import StorageTarget
from trainchaos.harness.arm.emulated_devices import EmulatedDevices, emulated
from trainchaos.harness.arm.fault_context import RecordEvent
from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.arm.keeper_tracker import KeeperTracker
from trainchaos.harness.arm.roster import Roster
from trainchaos.harness.arm.timers import Timers
from trainchaos.harness.launch.launcher import (
    ArmSetup,
    Cluster,
    GroupControl,
    LinkControl,
    MachineControl,
    StoreControl,
)
from trainchaos.harness.run.coordinator import Coordinator
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.health.signs import ReportFile
from trainchaos.recovery.supervise.controller import Controller

_T = TypeVar("_T")


class BuiltInScene:
    """Implements ``harness.arm.fault_context.Scene``. ``roster`` and ``keepers`` know the processes
    of the arm; ``spares``: the number that the job starts with.
    """

    def __init__(
        self,
        setup: ArmSetup,
        cluster: Cluster,
        coordinator: Coordinator,
        timers: Timers,
        *,
        record: RecordEvent,
        spares: int,
    ) -> None:
        self.setup = setup
        self.ledger, self.in_force = Ledger(setup.run.ledger), ActiveEffects()
        self.health = ReportFile(setup.run.root / "health" / f"{setup.id}.jsonl")
        self.record = record
        self.later, self.now_ns = timers.later, cluster.now_ns
        self.send = cluster.send
        self._cluster = cluster
        self._coordinator = coordinator
        self.roster = Roster(self, cluster, spares=spares)
        self.keepers = KeeperTracker(self, cluster)
        self.node_of, self.device_of = self.roster.node_of, self.roster.device_of
        self.living, self.gone = self.roster.living, self.roster.gone
        self.devices = EmulatedDevices(
            emulated(setup.cell.scenario.faults),
            setup.cell.scenario.workload.ranks,
            device_of=lambda rank: self._of_rank(rank, self.roster.device_of),
            node_of=lambda rank: self._of_rank(rank, self.roster.node_of),
            seed=f"{setup.seed}/{setup.arm}",
        )
        self.refuse_device = self.roster.refuse_device
        self.accept_device = self.roster.accept_device

    @property
    def controller(self) -> Controller:
        """The controller that supervises, or did last."""
        return self._coordinator.controller

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator supervises the job now."""
        return self._coordinator.there

    def lose_coordinator(self, down_s: float) -> None:
        """Drop the coordinator with all its state; another takes over ``down_s`` seconds later."""
        self._coordinator.lose(down_s)
        self._cluster.away()

    @property
    def storage(self) -> StorageTarget | None:
        """The file system of the checkpoints, if they have one of their own."""
        return self._cluster.storage

    @property
    def groups(self) -> GroupControl | None:
        """Limits on memory."""
        return self._cluster.groups

    @property
    def store(self) -> StoreControl | None:
        """The key-value store, if it is a process of its own."""
        return self._cluster.store

    @property
    def links(self) -> LinkControl | None:
        """Shapes connections between ranks."""
        return self._cluster.links

    @property
    def machines(self) -> MachineControl | None:
        """Control of whole nodes."""
        return self._cluster.machines

    def signal(self, process: str, signum: int) -> None:
        """Signal a rank, a spare or a keeper."""
        self._holder_of(process).signal(process, signum)

    def os_state(self, process: str) -> str:
        """The kernel's state of a rank, a spare or a keeper."""
        return self._holder_of(process).os_state(process)

    def process_of(self, rank: int) -> str | None:
        """The living process that holds a rank."""
        process = self.controller.process_of(rank)
        return None if process is None or self.roster.gone(process) else process

    def _of_rank(self, rank: int, what: Callable[[str], _T | None]) -> _T | None:
        process = self.process_of(rank)
        return None if process is None else what(process)

    def spare(self, index: int) -> str | None:
        """The process that waits as spare number ``index``."""
        ready = self.controller.ready_spares
        return ready[index] if index < len(ready) else None

    def on_node(self, node: int) -> list[str]:
        """The living processes of a node."""
        return [*self.roster.on_node(node), *self.keepers.on(node)]

    def _holder_of(self, process: str) -> Cluster | KeeperTracker:
        return self.keepers if self.keepers.owns(process) else self._cluster
