"""What a command does not let the harness have: the parts of a scene that need to be inside, or to be its launcher."""

from __future__ import annotations

from collections.abc import Mapping

from harness.script.observer import Observer
from harness.script.ranks import Ranks


class Outside:
    """Answers for all of ``harness.scene.Scene`` that a program which is not ours does not offer."""

    observer: Observer
    _ranks: Ranks

    def training(self) -> Mapping[str, int]:
        """Those of its ranks that are there, with their pids, while steps come and nothing has failed."""
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
