"""How long a rank has kept others waiting or has waited itself, not counting time in which other
processes kept it from running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import Mark

MAX_LOOK_S = 0.1
MAX_LOOK_A_RANK_S = 30e-6
"""Six times what a look takes for each of many thousand ranks on a slow processor (5 us; 2 us on a
quick one): as long as a look and the rest after it (``paced_look.REST``), and some more.
"""
SURE = 0.25
"""Part of its deadline for which a rank is silent before its starvation is measured: that reads
each of its threads.
"""


def max_look_s(ranks: int) -> float:
    """Longest time between two looks at so many ranks, and the most of it that counts as silence:
    time in which the supervisor itself gets no CPU does not.
    """
    return max(MAX_LOOK_S, ranks * MAX_LOOK_A_RANK_S)


@dataclass(frozen=True, kw_only=True)
class PollTime:
    """At all members at once. ``passed_s``: since the look before, as far as it counts."""

    now_s: float
    passed_s: float

    @classmethod
    def after(cls, last_s: float | None, now_s: float, ranks: int) -> PollTime:
        """A look now at so many ranks, after one at ``last_s``; None: it is the first."""
        passed_s = 0.0 if last_s is None else min(now_s - last_s, max_look_s(ranks))
        return cls(now_s=now_s, passed_s=passed_s)


@dataclass(kw_only=True)
class Silence:
    """How long a member, with this very mark, kept others waiting, how long it waited itself,
    how long none waited for it alone (``shared_s``; ``common_s`` of it with most others,
    for a few who wait), and since when the kernel shows it as stopped. ``unasked_s``: what was
    counted since it was last asked what kept it (``asked_s``, ``starved_s``).
    """

    mark: Mark
    behind_s: float = 0.0
    waited_s: float = 0.0
    shared_s: float = 0.0
    common_s: float = 0.0
    stopped_s: float | None = None
    starved_s: float = 0.0
    asked_s: float | None = None
    unasked_s: float = 0.0

    @property
    def untouched(self) -> bool:
        """Whether nothing was counted yet."""
        counted = self.behind_s or self.waited_s or self.shared_s or self.unasked_s
        return not counted and self.asked_s is None and self.stopped_s is None

    def waits(
        self,
        look: PollTime,
        deadline_s: float,
        pulse: Callable[[], Pulse],
        stuck: Callable[[], bool],
    ) -> None:
        """It is one of those that wait. ``stuck``: whether to ask what kept it."""
        self.waited_s = max(0.0, self.waited_s + self._net(look, deadline_s, pulse, asks=stuck))

    def lags(
        self, look: PollTime, deadline_s: float, pulse: Callable[[], Pulse], works: float
    ) -> None:
        """It keeps others waiting. ``works``: how much counts of time in which it uses a
        processor.
        """
        self.behind_s = max(0.0, self.behind_s + self._net(look, deadline_s, pulse, works))

    def _net(
        self,
        look: PollTime,
        deadline_s: float,
        pulse: Callable[[], Pulse],
        works: float = 1.0,
        asks: Callable[[], bool] = lambda: True,
    ) -> float:
        """Of the time since the last look, how much it was not kept from running by others; less
        than nothing, when it turns out only now that it was kept from running before.
        """
        self.unasked_s += look.passed_s
        if self.behind_s + self.waited_s < SURE * deadline_s or not asks():
            return look.passed_s
        now, credit_s = pulse(), 0.0
        if self.asked_s is not None:
            held_s = now.starved_s - self.starved_s
            # What was counted of this time; and what is too long for this time was earlier. Between
            # the two it may have been in time that was counted against none.
            credit_s = min(held_s, self.unasked_s) + max(0.0, held_s - (look.now_s - self.asked_s))
        self.starved_s, self.asked_s, self.unasked_s = now.starved_s, look.now_s, 0.0
        return (look.passed_s - credit_s) * (works if now.working else 1.0)


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
