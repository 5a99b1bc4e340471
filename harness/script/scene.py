"""The injector's view of a command, which is not ours: its ranks are found and signalled; acts that
need its launcher, or code inside it, are not supported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.arm.observer import Timers
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.storage import Storage, mount_for
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.point_broker import PointBroker
from trainchaos.harness.script.processes.ranks import Ranks
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.process.host import RecordEvent


class CommandSurface:
    """Implements ``harness.launch.launcher.FaultSurface``: a command has a file system for its
    checkpoints at most, from ``CommandScene.mount`` on, if a fault needs it.
    """

    links = groups = store = machines = None
    storage: Storage | None = None


class CommandScene:
    """Implements ``harness.arm.fault_context.Scene``."""

    def __init__(
        self,
        setup: ArmSetup,
        *,
        ranks: Ranks,
        observer: Observer,
        broker: PointBroker,
        timers: Timers,
        record: RecordEvent,
    ) -> None:
        self.setup = setup
        self.ledger, self.in_force = Ledger(setup.run.ledger), ActiveEffects()
        self.surface = CommandSurface()
        self.record, self.later, self.now_ns = record, timers.later, time.monotonic_ns
        # A command has no agents in its ranks; the broker keeps their points for them.
        self.send = broker.take
        self.signal, self.os_state = ranks.signal, ranks.state
        self.process_of = observer.process_of
        self._ranks, self._observer = ranks, observer
        self._stored = False

    # ---- storage

    def mount(self) -> None:
        """Mount the file system of the checkpoints, if a fault needs one."""
        self.surface.storage = mount_for(self.setup)

    def look_at_storage(self) -> None:
        """Note whether the command writes there."""
        self._stored = self._stored or (
            self.surface.storage is not None and self.surface.storage.used()
        )

    @property
    def storage_unused(self) -> bool:
        """Whether there is such a file system and it has never been used."""
        return self.surface.storage is not None and not self._stored

    def close(self) -> None:
        """Unmount it, after a last look."""
        if self.surface.storage is not None:
            self.look_at_storage()
            self.surface.storage.close()

    # ---- ranks

    def on_node(self, node: int) -> list[str]:
        """The processes of the node's ranks; nodes are only an assignment of a command's ranks."""
        ranks = self.setup.cell.scenario.topology.ranks_on(node)
        return [name for name in map(self.process_of, ranks) if name]

    def training(self) -> Mapping[str, int]:
        """The present ranks with their pids, while steps are reported and nothing has failed."""
        seen = self._observer
        if seen.failing or seen.committed_here is None:
            return {}
        return {name: pid for name in seen.members.values() if (pid := self._ranks.pid_of(name))}

    # ---- what a command has of its own, or what is not known of it

    has_coordinator = False
    health = devices = None

    def lose_coordinator(self, down_s: float) -> None:
        """Never called: no launcher of a command offers it."""
        raise RuntimeError("a command has no coordinator that could be lost")

    def node_of(self, process: str) -> int | None:
        """Not known: nodes are only names."""
        return None

    def device_of(self, process: str) -> str | None:
        """Not known."""
        return None

    def spare(self, index: int) -> str | None:
        """Its launcher, if it lives: a command's spares are not known."""
        return self._ranks.launcher

    def refuse_device(self, process: str) -> str:
        """A command chooses its own devices."""
        raise RuntimeError("a command chooses its devices itself: no device can be refused to it")

    def accept_device(self, process: str) -> None:
        """Nothing to undo."""
