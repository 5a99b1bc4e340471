"""How long to wait before a failed attempt is repeated: at first not at all, then longer and
longer. Pure.

A job may run for a year and meet any number of failures: what counts is how close together they
are.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

SOUND_S = 300.0  # a process that lived for this long was started successfully
MOMENT_S = 1.0  # within which the processes of one node end
MAX_DOUBLINGS = 30
REMEMBERED = 32


@dataclass(frozen=True, kw_only=True)
class BackoffSchedule:
    """The waits after failures in a row. ``free``: that many cost nothing, the next attempt is made
    at once; one more costs ``first_s`` seconds of waiting, each further one twice as much, up to
    ``most_s``. A lifetime of ``SOUND_S`` ends a row.
    """

    free: int
    first_s: float
    most_s: float

    def again_s(self, times_s: Iterable[float], *, together: float = math.inf) -> float:
        """The time from which on to try again, -inf: at any time. ``times_s``: of the failures; of
        those within one moment as many as may have run ``together`` count once.
        """
        row, wait_s, last_s = 0, 0.0, -math.inf
        since_s, several = -math.inf, 0
        for time_s in sorted(times_s):
            if time_s > last_s + wait_s + SOUND_S:
                row = 0
            if time_s >= since_s + MOMENT_S:
                since_s, several = time_s, 0
            several += 1
            row += several == 1 or several > together
            over = min(row - self.free - 1, MAX_DOUBLINGS)
            wait_s = min(self.most_s, self.first_s * 2**over) if over >= 0 else 0.0
            last_s = time_s
        return last_s + wait_s if wait_s else -math.inf


class Reputation:
    """Which places, such as nodes or devices, to avoid for a while, because processes failed there
    again and again.
    """

    ROW = BackoffSchedule(free=2, first_s=60.0, most_s=3600.0)

    def __init__(self) -> None:
        self._failures: dict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def failed(self, place: Hashable, now_s: float) -> None:
        self._failures[place].append(now_s)

    def avoids(self, place: Hashable, now_s: float) -> bool:
        """Whether to start nothing there as long as other places exist."""
        failures = self._failures.get(place)
        return failures is not None and now_s < self.ROW.again_s(failures)
