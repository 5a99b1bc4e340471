"""What an agent does that its coordinator does not admit: it dials again, ever more slowly."""

from __future__ import annotations

from collections.abc import Callable

SOONEST_S = 0.05
LATEST_S = 1.0


class Rejections:
    """Since the agent was admitted last. ``say``: called with each reason, once in a row.

    The agent does not end at once: it may be the successor of one whose connection the coordinator
    still counts as alive.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._pause_s = 0.0
        self.why = ""

    def turned_away(self, why: str) -> None:
        """The coordinator has said why it does not admit this agent."""
        if why != self.why:
            self.why = why
            self._say(f"turned away by the coordinator, and dials again: {why}")

    def admitted(self) -> None:
        """The coordinator has admitted it."""
        self.why, self._pause_s = "", 0.0

    def pause_s(self) -> float:
        """How long to wait before the next attempt, after a connection that came to nothing."""
        pause_s, self._pause_s = self._pause_s, min(LATEST_S, max(SOONEST_S, 2 * self._pause_s))
        return pause_s
