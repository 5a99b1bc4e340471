"""Runs actions of an arm after a delay, on the arm's own clock."""

from __future__ import annotations

from collections.abc import Callable


class Timers:
    """``now_ns``: the clock of the arm."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns
        self._pending: list[tuple[int, Callable[[], None]]] = []  # in the order they were set

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``delay_s`` seconds, if the arm still runs then."""
        self._pending.append((self.now_ns() + int(delay_s * 1e9), action))

    def run_due(self) -> None:
        """Run the actions that are due. An action set by another waits for the next call."""
        now = self.now_ns()
        due = [action for due_ns, action in self._pending if due_ns <= now]
        self._pending = [item for item in self._pending if item[0] > now]
        for action in due:
            action()
