"""Simulated time: a heap of actions, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

NS_PER_S = 1_000_000_000
START_NS = 1_000 * NS_PER_S
LOOK_NS = 1_000


class Clock:
    """Runs actions in the order of their times; those of equal time in the order of scheduling."""

    def __init__(self) -> None:
        self._now = START_NS
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    @property
    def now_ns(self) -> int:
        """The present; reading it takes no time."""
        return self._now

    def read(self) -> int:
        """Read the clock, which takes a microsecond: no two events of one actor share a time."""
        self._now += LOOK_NS
        return self._now

    def after(self, delay_ns: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` to run ``delay_ns`` from now."""
        self._count += 1
        heapq.heappush(self._heap, (self._now + max(0, int(delay_ns)), self._count, action))

    def advance(self, until_ns: int) -> bool:
        """Run the next action due by ``until_ns``; if there is none, move the clock there and
        return False.
        """
        if not self._heap or self._heap[0][0] > until_ns:
            self._now = max(self._now, until_ns)
            return False
        due, _, action = heapq.heappop(self._heap)
        self._now = max(self._now, due)
        action()
        return True
