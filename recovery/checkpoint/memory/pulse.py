"""Whether keepers answer their supervisor: one that is stopped or stuck holds up every save, and is
replaced by an empty one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

REST_S = 1.0
"""From an answer to the next question."""
HUNG_S = 5.0
"""A keeper answers from a thread that does nothing else: at once, on a busy machine in less than a
second.
"""
LOOK_S = 0.1
"""Between two looks: a supervisor of many keepers turns a thousand times a second."""
TURN_S = 0.5
"""A turn of the supervisor counts for no more: while it was itself paused it heard nobody."""


@dataclass(kw_only=True)
class _Wait:
    """``limit_s``: for the answer; infinite while nothing is asked."""

    limit_s: float = math.inf
    waited_s: float = 0.0


class Pulse:
    """Used by the supervisor's thread. ``start_limit_s``: for the first sign of life."""

    def __init__(self, start_limit_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._start_limit_s = start_limit_s
        self._now_s = now_s
        self._turned_s = now_s()
        self._waits: dict[str, _Wait] = {}

    def started(self, process: str) -> None:
        """Expect a sign of life."""
        self._waits[process] = _Wait(limit_s=self._start_limit_s)

    def heard(self, process: str) -> None:
        """It gave one."""
        if process in self._waits:
            self._waits[process] = _Wait()

    def ended(self, process: str) -> None:
        """Expect nothing of it any more."""
        self._waits.pop(process, None)

    def turn(self, reachable: Callable[[str], bool]) -> tuple[list[str], dict[str, float]]:
        """Those to be asked now, and those that hang, with the seconds for which they have not
        answered; they are forgotten. Call it after what came was read. One that cannot be reached
        is neither asked nor waited for meanwhile.
        """
        now_s = self._now_s()
        if now_s - self._turned_s < LOOK_S:
            return [], {}
        passed_s, self._turned_s = min(now_s - self._turned_s, TURN_S), now_s
        asked: list[str] = []
        hung: dict[str, float] = {}
        for process, wait in self._waits.items():
            wait.waited_s += passed_s
            if math.isinf(wait.limit_s):
                if wait.waited_s >= REST_S and reachable(process):
                    self._waits[process] = _Wait(limit_s=HUNG_S)
                    asked.append(process)
            elif not reachable(process):
                wait.waited_s = 0.0
            elif wait.waited_s > wait.limit_s:
                hung[process] = wait.waited_s
        for process in hung:
            del self._waits[process]
        return asked, hung
