"""How far a generation got, by its members' progress marks, and whether one of them hangs."""

from __future__ import annotations

from collections.abc import Iterable

from recovery.detect import Hang, HangDetector, HangLimits
from recovery.supervision import Hands


class ProgressWatch:
    """Reads marks. ``committed``: highest step ever committed by all members of a generation."""

    def __init__(self, hands: Hands, limits: HangLimits) -> None:
        self.committed = 0
        self.detector = HangDetector(limits=limits)
        self._hands = hands

    def resumed(self) -> None:
        """A generation starts training."""
        self.detector.resumed()

    def look(self, generation: int, names: Iterable[str]) -> Hang | None:
        """Note progress of the members still at work, and return the worst hang among them.

        A hang of the process ``""`` is nobody's: all wait in one collective.
        """
        now = self._hands.now_s()
        marks = {name: self._hands.mark(name) for name in names}
        marks = {name: mark for name, mark in marks.items() if mark.generation == generation}
        if not marks:
            return None
        committed = min(mark.committed for mark in marks.values())
        self.committed = max(self.committed, committed)
        self.detector.observe(now, committed)
        return self.detector.look(now, marks, self._hands.os_state)
