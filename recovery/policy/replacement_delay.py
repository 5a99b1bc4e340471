"""Delays replacements until a new generation has made a step: starting a process earlier takes the
CPU that its ranks need to recover.
"""

from __future__ import annotations


class ReplacementDelay:
    """Reports once for each generation that it has made a step, or has had ``limit_s`` seconds for
    it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._step, self._since_s = 0, 0.0
        self._settled = False

    def began(self, step: int, now_s: float) -> None:
        """A generation trains from this step on."""
        self._step, self._since_s, self._settled = step, now_s, False

    def just_settled(self, committed: int, now_s: float) -> bool:
        """True once per generation: lost or used processes can be replaced now."""
        if self._settled or (committed <= self._step and now_s <= self._since_s + self._limit_s):
            return False
        self._settled = True
        return True
