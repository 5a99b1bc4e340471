"""How far a rate may be from its peers' and from its baseline's, at a stated rate of false alarms.

Rates are compared by their logarithms: what slows a device or link down does so by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from trainchaos.recovery.health.statistics.robust import median, spread
from trainchaos.recovery.health.statistics.tails import student_quantile

FALSE_ALARMS = 0.01
"""Probability that a preflight of a healthy machine finds something slow, over all comparisons of
one kind (divided between them: union bound).
"""
PEER_FLOOR = 0.25
"""Share below its peers that is left alone: as for the detector ``straggler`` (docs/health.md), a
lasting difference of so much is taken to be normal.
"""
BASELINE_FLOOR = 0.10
"""Share below the baseline that is left alone, as the detector ``slow-link`` does."""
LATENCY_FLOOR = 2.0
"""Times the baseline that a latency may have: it is as much the queue's before a device as the
device's. On 2 shared cores the median of a store's round trips was 1.2 times that of a quiet minute
(spread of the repeats: 1 %).
"""
ROUNDS = 5
"""Of each measurement that is compared: all of them must be slow, so that with more of them a lower
limit keeps the rate of false alarms, while each takes time.
"""
_TINY = 1e-12

Name = TypeVar("Name")
"""Of what is compared: a place, or a pair of them."""


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least ``part`` of the values do not exceed; nan of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def in_rounds(values: Sequence[float], rounds: int = ROUNDS) -> list[float]:
    """Medians of ``rounds`` successive parts; of fewer values, the values."""
    if len(values) < rounds:
        return list(values)
    edges = [len(values) * i // rounds for i in range(rounds + 1)]
    return [median(values[edges[i] : edges[i + 1]]) for i in range(rounds)]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A place beside its peers. ``ratio``: to their median; ``bound``: below which it is slow, in
    all rounds.
    """

    ratio: float
    bound: float
    slow: bool


def peer_limit(residuals: Sequence[float], places: int, rounds: int) -> float:
    """Logarithm by which a place must be below its peers in each of ``rounds`` rounds.

    Null model: lasting differences below PEER_FLOOR, and noise of Student's t with 3 degrees of
    freedom, independent between rounds; a false alarm needs all of them, so each may be exceeded
    with probability (FALSE_ALARMS / places) ** (1 / rounds).
    """
    each = min(0.5, (FALSE_ALARMS / max(1, places)) ** (1.0 / max(1, rounds)))
    noise = spread(residuals, 0.0) * student_quantile(each) if residuals else 0.0
    return -math.log1p(-PEER_FLOOR) + noise


def slow_among(values: Mapping[Name, Sequence[float]]) -> dict[Name, Compared]:
    """Each place beside the median of the others, round by round; empty for fewer than two places
    or without rounds. ``values``: of each place, high is good, the same rounds.
    """
    rounds = min((len(one) for one in values.values()), default=0)
    if len(values) < 2 or not rounds:
        return {}
    ratios = {
        name: [
            _log(own[k]) - _log(median([v[k] for other, v in values.items() if other != name]))
            for k in range(rounds)
        ]
        for name, own in values.items()
    }
    residuals = residuals_of(ratios)
    limit = peer_limit(residuals, len(values), rounds)
    return {
        name: Compared(ratio=math.exp(median(own)), bound=math.exp(-limit), slow=max(own) < -limit)
        for name, own in ratios.items()
    }


def residuals_of(logs: Mapping[Name, Sequence[float]]) -> list[float]:
    """Of each series, the distances from its own median."""
    return [value - median(own) for own in logs.values() for value in own]


def slow_beside(own: Sequence[float], reference: Sequence[float], limit: float) -> bool:
    """Whether the median is more than a logarithm below the median of others."""
    level = _log(median(reference))
    return bool(own) and _log(median(own)) - level < -limit


def _log(value: float) -> float:
    return math.log(max(_TINY, value))


def confirming_limit(slow: Sequence[float], reference: Sequence[float]) -> float:
    """Logarithm by which a later measurement must be below others to be slow as well: a third of
    what the slow ones lost, as both of a pair may be slow; PEER_FLOOR at the least, three quarters
    at the most. What is slow among peers keeps the rate of false alarms; this says whose it is.
    """
    between = (_log(median(reference)) - _log(median(slow))) / 3.0
    return min(math.log(4.0), max(-math.log1p(-PEER_FLOOR), between))


def log(value: float) -> float:
    """Logarithm; of nothing, that of a very small value."""
    return _log(value)


def baseline_limit(
    repeats: Sequence[float], comparisons: int, *, latency: bool = False
) -> tuple[float, float]:
    """(level, limit), both logarithms: a new value further than ``limit`` from the level, to the
    bad side, is a false alarm with probability FALSE_ALARMS / comparisons at the most.

    Prediction limit of one new value of a normal distribution of which the mean and the variance
    are those of ``repeats`` (Hahn and Meeker, Statistical Intervals, 1991, sec. 4.7): t s sqrt(1 +
    1/n), n - 1 degrees of freedom; BASELINE_FLOOR at the least, of a latency LATENCY_FLOOR. Raises
    ValueError for fewer than two repeats.
    """
    n = len(repeats)
    if n < 2:
        raise ValueError("a spread needs two repeats")
    logs = [_log(one) for one in repeats]
    level = math.fsum(logs) / n
    scale = math.sqrt(math.fsum((one - level) ** 2 for one in logs) / (n - 1))
    t = t_quantile(n - 1, FALSE_ALARMS / max(1, comparisons))
    floor = math.log(LATENCY_FLOOR) if latency else -math.log1p(-BASELINE_FLOOR)
    return level, max(floor, t * scale * math.sqrt(1.0 + 1.0 / n))


def t_tail(degrees: int, t: float) -> float:
    """P(T > t) of Student's t, t >= 0: with t = sqrt(degrees) tan(a), the density becomes a power
    of the cosine, which Simpson's rule integrates from a to a right angle.
    """
    start = math.atan(t / math.sqrt(degrees))
    n = 400
    step = (math.pi / 2.0 - start) / n
    total = math.fsum(
        (1.0 if k in (0, n) else 4.0 if k % 2 else 2.0)
        * max(0.0, math.cos(start + k * step)) ** (degrees - 1)
        for k in range(n + 1)
    )
    size = math.lgamma((degrees + 1) / 2.0) - math.lgamma(degrees / 2.0)
    return math.exp(size) / math.sqrt(math.pi) * total * step / 3.0


@cache
def t_quantile(degrees: int, tail: float) -> float:
    """t with P(T > t) = ``tail``, in (0, 0.5]: bisection. Raises ValueError for another tail."""
    if not 0.0 < tail <= 0.5:
        raise ValueError(f"a tail is in (0, 0.5]: {tail}")
    low, high = 0.0, 1.0
    while t_tail(degrees, high) > tail:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if t_tail(degrees, middle) > tail else (low, middle)
    return high
