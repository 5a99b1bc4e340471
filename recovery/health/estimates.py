"""Estimates that few wild values do not move, readings in blocks of time, and drops below the
recent past. Pure.

Of all places the median of each block is taken: a burst that is shorter than half of a block does
not show, and neighbouring blocks depend less on each other than neighbouring readings.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from trainchaos.chaos.stats import student_quantile
from trainchaos.recovery.health.readings import Place, Reading

NU = 3.0
"""Degrees of freedom of the null model of noise: Student's t with 3 has a finite variance and the
heaviest tail of those with a whole number of degrees that do (P(T > t) ~ 1.1 / t^3). Step times and
gradient norms are heavy-tailed; how heavy differs from job to job, so the model errs to that side.
"""
STUDENT_MAD = student_quantile(0.25, NU)
"""Median absolute deviation of the null model: an observed one, divided by this, is its scale."""
NORMAL_MAD = NormalDist().inv_cdf(0.75)

MAD_ERROR = 1.17
"""Standard error of a median absolute deviation, relative, times the root of n (normal values:
Rousseeuw and Croux 1993, efficiency of 37 %).
"""
SIGN_ERROR = math.pi / 2.0
"""Standard error of ``autocorrelation``, times the root of n, of values without any."""


def median(values: Sequence[float]) -> float:
    """The middle value; nan of none."""
    return statistics.median(values) if values else math.nan


def without_trend(values: Sequence[float]) -> tuple[float, list[float]]:
    """Where a straight line through the medians of both halves ends, and the distances from it
    (resistant line: Tukey, Exploratory Data Analysis, 1977, with halves for his thirds).
    """
    n = len(values)
    half = n // 2
    first, last = median(values[:half]), median(values[half:])
    slope = (last - first) / (n / 2.0) if half else 0.0
    middle = (n - 1) / 2.0
    distances = [value - slope * (i - middle) for i, value in enumerate(values)]
    level = median(distances)
    return level + slope * (n - middle), [value - level for value in distances]


def spread(values: Sequence[float], centre: float, *, normal: bool = False) -> float:
    """Scale of the null model (Student's t with NU degrees), or of a normal one, from the
    median absolute deviation. With three standard errors on top: a scale that is taken to be too
    small makes false alarms.
    """
    mad = median([abs(value - centre) for value in values])
    sure = 1.0 + 3.0 * MAD_ERROR / math.sqrt(max(1, len(values)))
    return sure * mad / (NORMAL_MAD if normal else STUDENT_MAD)


def autocorrelation(values: Sequence[float], centre: float, errors: float = 1.0) -> float:
    """Of neighbours, in [0, 0.95]: from how often both are on one side of the centre (quadrant
    correlation, Blomqvist 1950), which no wild value moves; with so many standard errors on top.
    """
    signs = [value > centre for value in values if value != centre]
    if len(signs) < 2:
        return 0.0
    same = sum(a == b for a, b in itertools.pairwise(signs)) / (len(signs) - 1)
    found = math.sin(math.pi / 2.0 * (2.0 * same - 1.0)) + errors * SIGN_ERROR / math.sqrt(
        len(signs)
    )
    return min(0.95, max(0.0, found))


MOST_IN_BLOCK = 4096
"""Readings of one place in one block that count; those that come after them are left out."""
MOST_PLACES = 20_000
SHORT = 8
"""Blocks in a row with less than half of the readings that are wanted, after which blocks become
longer: a pause makes two.
"""


class Block(NamedTuple):
    """``medians`` of the places that had ``least`` readings in it; from ``start_s`` on."""

    start_s: float
    medians: Mapping[Place, float]


@dataclass(kw_only=True)
class Blocks:
    """``block_s``: length; ``least``: readings without which a place has no median; ``wanted``: in
    a block: it becomes longer if no place has half of them (0: it stays as it is).
    """

    block_s: float
    least: int = 1
    wanted: int = 0
    _short: int = 0
    _fullest: int = 0
    _values: dict[Place, list[float]] = field(default_factory=dict, repr=False)
    _index: float = -math.inf

    def add(self, reading: Reading) -> Iterator[Block]:
        """The block before, if this reading is in a later one. A clock that is set back begins a
        new block, and what was in this one is forgotten.
        """
        number = reading.time_s / self.block_s
        if not (math.isfinite(number) and math.isfinite(reading.value)):
            return
        index = math.floor(number)
        if index != self._index:
            if index > self._index and self._values:
                if self._too_short():
                    index = math.floor(reading.time_s / self.block_s)
                else:
                    yield self._close()
            self._values, self._index = {}, index
        values = self._values.get(reading.where)
        if values is None:
            if len(self._values) >= MOST_PLACES:
                return
            values = self._values[reading.where] = []
        if len(values) < MOST_IN_BLOCK:
            values.append(reading.value)

    def _too_short(self) -> bool:
        """Whether the block had not half of what is wanted; then nothing is said of it."""
        most = max(map(len, self._values.values()))
        if 2 * most >= self.wanted:
            self._short = self._fullest = 0
            return False
        self._short, self._fullest = self._short + 1, max(self._fullest, most)
        if self._short >= SHORT:
            self.block_s *= math.ceil(self.wanted / self._fullest)
            self._short = self._fullest = 0
        return True

    def _close(self) -> Block:
        medians = {
            where: median(values)
            for where, values in self._values.items()
            if len(values) >= self.least
        }
        return Block(self._index * self.block_s, medians)


def of_others(medians: Mapping[Place, float]) -> dict[Place, float]:
    """The median of the other places, for each that has two others at the least: with one, nobody
    could say which of both is the odd one.
    """
    n = len(medians)
    if n < 3:
        return {}
    ordered = sorted(medians, key=medians.__getitem__)
    values = [medians[where] for where in ordered]
    found = {}
    for i, where in enumerate(ordered):
        low, high = (n - 2) // 2, (n - 1) // 2  # of the n - 1 others
        found[where] = (values[low + (low >= i)] + values[high + (high >= i)]) / 2.0
    return found


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
THETA = 1.1968905799590894
"""The solution of E exp(THETA (z - SLACK)) = 1 with z as the null model has it."""


class Drop(NamedTuple):
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
    """A lasting drop below the recent past, however small: a cumulative sum (Page 1954).

    Null model: a level that moves slowly, with noise of Student's t with 3 degrees of freedom, cut
    off at ``CLIP`` scales, autocorrelated. The sum S = max(0, S + z - ``SLACK``) exceeds h in a
    step with probability exp(-theta h) at the most, and so at a mean distance of exp(theta h) steps
    at the least, where theta > 0 solves E exp(theta (z - SLACK)) = 1 (Wald's identity; Siegmund,
    Sequential Analysis, 1985, sec. II.6). Autocorrelation r of first order makes sums vary more, by
    (1 + r) / (1 - r) in their variance, and theta as much smaller.

    Where r is high, as on a machine that others use, that takes many blocks however much is lost,
    as each counts ``CLIP`` at the most. A second sum is of what is new in each block, its distance
    from the level less r times that of the block before: without autocorrelation in the null model,
    and soon above its limit where much is lost. Each sum has half of the false alarms.

    ``tail``: false alarms a block; ``least``: smallest drop that counts, in the values' unit.
    """

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
        short = -math.log(self.tail / 2.0) / THETA
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
