"""Looks at all marks of a job less often where a look takes long, so that messages are read and
answered in between.
"""

from __future__ import annotations

from collections.abc import Callable

from trainchaos.recovery.detection.silence import max_look_s

REST = 4.0  # times as long as a look took until the next: it takes a fifth of the time at most


class PacedLook:
    """``now_s``: the clock, seconds. A look of 16,384 ranks takes 0.03 s of a quick core and 0.08 s
    of a slow one, one of 64 far less than the 0.02 s between two looks.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._due_s = now_s()

    def take(self, look: Callable[[], None], ranks: int = 0) -> None:
        """Look at so many ranks, unless the last look is too recent."""
        begun_s = self._now_s()
        if begun_s < self._due_s:
            return
        look()
        ended_s = self._now_s()
        self._due_s = ended_s + min(max_look_s(ranks), REST * (ended_s - begun_s))

    def in_s(self, wanted_s: float) -> float:
        """Seconds until the next look, which is wanted within ``wanted_s``."""
        return max(wanted_s, self._due_s - self._now_s())
