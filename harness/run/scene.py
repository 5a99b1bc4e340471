"""What the injector may read and change in an arm of built-in ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.arm.emulated_devices import EmulatedDevices, emulated
from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.arm.roster import ArmRoster
from trainchaos.harness.arm.timers import Timers
from trainchaos.harness.launch.launcher import ArmSetup, Cluster
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.health.readings.reports import ReportFile
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.supervise.keeper_log import KeeperLog

_T = TypeVar("_T")


class LosableSupervisor(Protocol):
    """``harness.run.orchestrator.Orchestrator``."""

    host: Cluster
    roster: ArmRoster
    keepers: KeeperLog
    controller: Controller

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event."""

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator supervises the job now."""

    def lose_coordinator(self, down_s: float) -> None:
        """Lose it; another takes over ``down_s`` seconds later."""

    def process_of(self, rank: int) -> str | None:
        """The living process that holds a rank."""


class BuiltInScene:
    """Implements ``harness.arm.fault_context.Scene``."""

    def __init__(
        self, setup: ArmSetup, arm: LosableSupervisor, ledger: Ledger, timers: Timers
    ) -> None:
        self._arm, roster, cluster = arm, arm.roster, arm.host
        self.setup, self.ledger, self.in_force = setup, ledger, ActiveEffects()
        self.health = ReportFile(setup.run.root / "health" / f"{setup.id}.jsonl")
        self.surface, self.send, self.now_ns = cluster, cluster.send, cluster.now_ns
        self.record, self.later = arm.record, timers.later
        self.process_of, self.lose_coordinator = arm.process_of, arm.lose_coordinator
        self.node_of, self.device_of = roster.node_of, roster.device_of
        self.refuse_device, self.accept_device = roster.refuse_device, roster.accept_device
        self.devices = EmulatedDevices(
            emulated(setup.cell.scenario.faults),
            setup.cell.scenario.workload.ranks,
            device_of=lambda rank: self._of_rank(rank, roster.device_of),
            node_of=lambda rank: self._of_rank(rank, roster.node_of),
            seed=f"{setup.seed}/{setup.arm}",
        )

    @property
    def controller(self) -> Controller:
        """The controller that supervises, or did last."""
        return self._arm.controller

    @property
    def has_coordinator(self) -> bool:
        return self._arm.has_coordinator

    def signal(self, process: str, signum: int) -> None:
        """Signal a rank, a spare or a keeper."""
        self._holder_of(process).signal(process, signum)

    def os_state(self, process: str) -> str:
        """The kernel's state of a rank, a spare or a keeper."""
        return self._holder_of(process).os_state(process)

    def _of_rank(self, rank: int, what: Callable[[str], _T | None]) -> _T | None:
        process = self.process_of(rank)
        return None if process is None else what(process)

    def spare(self, index: int) -> str | None:
        ready = self.controller.ready_spares
        return ready[index] if index < len(ready) else None

    def on_node(self, node: int) -> list[str]:
        return [*self._arm.roster.on_node(node), *self._arm.keepers.on(node)]

    def _holder_of(self, process: str) -> Cluster | KeeperLog:
        return self._arm.keepers if self._arm.keepers.owns(process) else self._arm.host
