"""A lasting drop below the recent past, however small: a cumulative sum (Page 1954).

Null model: a level that moves slowly, with noise of Student's t with 3 degrees of freedom, cut off
at ``CLIP`` scales, autocorrelated. The sum S = max(0, S + z - ``SLACK``) exceeds h in a step with
probability exp(-theta h) at the most, and so at a mean distance of exp(theta h) steps at the least,
where theta > 0 solves E exp(theta (z - SLACK)) = 1 (Wald's identity; Siegmund, Sequential Analysis,
1985, sec. II.6). Autocorrelation r of first order makes sums vary more, by (1 + r) / (1 - r) in
their variance, and theta as much smaller.

Where r is high, as on a machine that others use, that takes many blocks however much is lost, as
each counts ``CLIP`` at the most. A second sum is of what is new in each block, its distance from
the level less r times that of the block before: without autocorrelation in the null model, and soon
above its limit where much is lost. Each sum has half of the false alarms.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from functools import cache

from trainchaos.chaos.stats import student_tail
from trainchaos.recovery.health.statistics.robust import NU, autocorrelation, median, spread

CLIP = 3.0
SLACK = 1.0
"""Half of the drop that is found fastest, in scales (Page): two scales of a block's median."""
HISTORY = 96
GAP = 16
"""Latest blocks that are not part of the history: a drop is not its own past while it is judged."""
LEAST_HISTORY = 48
FORGET = 128
"""Blocks after which what was a drop is the new level."""
WELL = 4


@cache
def exponent() -> float:
    """theta, by bisection; the expectation by the trapezium rule."""
    n = 2000
    width = 2.0 * CLIP / n
    density = 2.0 / (math.pi * math.sqrt(NU))
    points = [-CLIP + width * i for i in range(n + 1)]
    weights = [width * density / (1.0 + x * x / NU) ** 2 for x in points]
    weights[0] = weights[0] / 2.0 + student_tail(CLIP, NU)
    weights[-1] = weights[-1] / 2.0 + student_tail(CLIP, NU)
    low, high = 1e-3, 20.0
    for _ in range(80):
        theta = (low + high) / 2.0
        pairs = zip(weights, points, strict=True)
        mean = math.fsum(w * math.exp(theta * (x - SLACK)) for w, x in pairs)
        low, high = (low, theta) if mean > 1.0 else (theta, high)
    return low


@dataclass(frozen=True, kw_only=True)
class Drop:
    """``level``: before; ``latest``: median since ``since_s``; ``score``: the sum, over its
    ``limit``.
    """

    level: float
    latest: float
    score: float
    limit: float
    since_s: float
    blocks: int

    @property
    def share(self) -> float:
        """Part of the level that is lost, where the values are logarithms."""
        return -math.expm1(self.latest - self.level)


@dataclass(kw_only=True)
class DropCusum:
    """``tail``: false alarms a block; ``least``: smallest drop that counts, in the values' unit."""

    tail: float
    least: float
    _history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY + GAP))
    _sum: float = 0.0
    _new: float = 0.0  # the second sum
    _since: list[float] = field(default_factory=list)
    _since_s: float = 0.0
    _level: float = 0.0
    _well: int = 0
    _dropped: int = 0

    def add(self, value: float, time_s: float) -> Drop | None:
        """A drop that began, once."""
        if self._dropped:
            self._wait(value)
            return None
        self._history.append(value)
        past = list(self._history)[:-GAP]
        if len(past) < LEAST_HISTORY:
            return None
        level = median(past)
        related = autocorrelation(past, level)
        short = -math.log(self.tail / 2.0) / exponent()
        limit = short * (1.0 + related) / (1.0 - related)
        if self._sum == self._new == 0.0:
            self._since, self._since_s = [], time_s
        self._since.append(value)
        least = max(1e-9 * abs(level), 1e-12)
        distances = [level - one for one in past]
        z = (level - value) / max(spread(distances, 0.0), least)
        self._sum = _grown(self._sum, z)
        steps = [one - related * before for before, one in itertools.pairwise(distances)]
        step = level - value - related * (level - self._history[-2])
        self._new = _grown(self._new, step / max(spread(steps, 0.0), least))
        now = median(self._since[-GAP:])
        if (self._sum <= limit and self._new <= short) or level - now < self.least:
            # They cannot grow without bound while the drop is too small to count.
            self._sum, self._new = min(self._sum, 2.0 * limit), min(self._new, 2.0 * short)
            self._since = self._since[-GAP:]
            return None
        self._dropped, self._level, self._well = 1, level, 0
        score, over = (self._sum, limit) if self._sum > limit else (self._new, short)
        return Drop(
            level=level,
            latest=now,
            score=score,
            limit=over,
            since_s=self._since_s,
            blocks=len(self._since),
        )

    def _wait(self, value: float) -> None:
        """For things to be well again, or for what is to become usual."""
        self._dropped += 1
        self._well = self._well + 1 if self._level - value < self.least / 2.0 else 0
        if self._well >= WELL:
            self._dropped, self._sum, self._new = 0, 0.0, 0.0
        elif self._dropped > FORGET:
            self._history.clear()
            self._dropped, self._sum, self._new = 0, 0.0, 0.0


def _grown(total: float, z: float) -> float:
    """A sum after a block that is so many scales below."""
    return max(0.0, total + min(CLIP, max(-CLIP, z)) - SLACK)
