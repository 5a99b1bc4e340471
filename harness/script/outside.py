"""What a command does not let the harness have: the parts of a scene that need to be inside, or to
be its launcher.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.launch.launcher import ArmSetup
from harness.script.listen.observer import Observer
from harness.script.processes.ranks import Ranks


class Outside:
    """Answers for all of ``harness.arm.fault_context.Scene`` that a program which is not ours does
    not offer, or that its ranks, held by pidfd, answer alone.
    """

    setup: ArmSetup
    observer: Observer
    _ranks: Ranks

    def signal(self, process: str, signum: int) -> None:
        """Through the held pidfd."""
        self._ranks.signal(process, signum)

    def os_state(self, process: str) -> str:
        """The kernel's word on it."""
        return self._ranks.state(process)

    def process_of(self, rank: int) -> str | None:
        """Who holds a rank, if it lives."""
        return self.observer.process_of(rank)

    def on_node(self, node: int) -> list[str]:
        """The holders of the node's ranks; a command's ranks are thought of as being on nodes."""
        ranks = self.setup.cell.scenario.topology.ranks_on(node)
        return [name for name in map(self.process_of, ranks) if name]

    def training(self) -> Mapping[str, int]:
        """Those of its ranks that are there, with their pids, while steps come and nothing has
        failed.
        """
        seen = self.observer
        if seen.failing or seen.committed_here is None:
            return {}
        return {name: pid for name in seen.members.values() if (pid := self._ranks.pid_of(name))}

    @property
    def has_coordinator(self) -> bool:
        """A command may have one; we do not know it."""
        return False

    def lose_coordinator(self, down_s: float) -> None:
        """Nobody asks for it: no launcher of a command offers it."""
        raise RuntimeError("a command has no coordinator that could be lost")

    @property
    def store(self) -> None:
        """A command has its own."""

    @property
    def health(self) -> None:
        """Nobody reads a health source for a command yet."""
        return None

    def node_of(self, process: str) -> int | None:
        """As far as we know a command runs on one node, and that is not asked for."""
        return None

    def device_of(self, process: str) -> str | None:
        """A command chooses its devices itself."""
        return None

    @property
    def groups(self) -> None:
        """A command's processes are in groups of its own choice."""
        return None

    @property
    def links(self) -> None:
        """A command's connections go straight."""

    @property
    def machines(self) -> None:
        """A command's nodes are only names."""

    def spare(self, index: int) -> str | None:
        """A command has no spares that anybody could tell."""
        return None

    def refuse_device(self, process: str) -> str:
        """A command chooses its devices itself."""
        raise RuntimeError("a command chooses its devices itself: no device can be refused to it")

    def accept_device(self, process: str) -> None:
        """Nothing was refused."""
