"""Which ranks hold at the point of a fault, and for how long they wait for the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chaos.schedule.plan import Point

PATIENCE_S = 10.0
"""For which those who hold wait for the others. A rank that hangs never comes, and is not found to
hang as long as those who would miss it hold.
"""
NS_PER_S = 1_000_000_000

Key = tuple[str, Point]
"""A fault, and where ranks hold for it."""


class Holds:
    """By fault and point: the ranks that hold there, and who they are."""

    def __init__(self) -> None:
        self._held: dict[Key, dict[int, str]] = {}
        self._since_ns: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._held))

    def at(self, key: Key) -> dict[int, str]:
        """Process by rank; empty where nobody holds."""
        return self._held.get(key, {})

    def came(self, key: Key, rank: int, process: str, now_ns: int) -> None:
        """A rank came to the point."""
        self._since_ns.setdefault(key, now_ns)
        self._held.setdefault(key, {})[rank] = process

    def left(self, key: Key, rank: int | None) -> None:
        """A rank went on by itself."""
        held = self._held.get(key, {})
        if rank is not None:
            held.pop(rank, None)
        if not held:
            self.end([key])

    def end(self, keys: Iterable[Key]) -> None:
        """Nobody holds there any more."""
        for key in list(keys):
            self._held.pop(key, None)
            self._since_ns.pop(key, None)

    def long_enough(self, key: Key, now_ns: int) -> bool:
        """Whether those who hold there have waited for the others for long enough."""
        return now_ns - self._since_ns.get(key, now_ns) >= PATIENCE_S * NS_PER_S
