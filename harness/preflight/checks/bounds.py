"""How far a rate may be from its peers', at a stated rate of false alarms.

Rates are compared by their logarithms: what slows a device or link down does so by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainchaos.chaos.stats import student_quantile
from trainchaos.recovery.health.estimates import NU, median, spread

FALSE_ALARMS = 0.01
"""Probability that a preflight of a healthy machine finds something slow, over all comparisons of
one kind (divided between them: union bound).
"""
PEER_FLOOR = 0.25
"""Share below its peers that is left alone: as for the detector ``straggler`` (docs/health.md), a
lasting difference of so much is taken to be normal.
"""
ROUNDS = 5
"""Of each measurement that is compared: all of them must be slow, so that with more of them a lower
limit keeps the rate of false alarms, while each takes time.
"""
_TINY = 1e-12

Name = TypeVar("Name")
"""Of what is compared: a place, or a pair of them."""


def log(value: float) -> float:
    """Logarithm; of nothing, that of a very small value."""
    return math.log(max(_TINY, value))


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


def slow_among(values: Mapping[Name, Sequence[float]]) -> dict[Name, Compared]:
    """Each place beside the median of the others, round by round; empty for fewer than two places
    or without rounds. ``values``: of each place, high is good, the same rounds.

    Null model: lasting differences below PEER_FLOOR, and noise of Student's t with NU degrees of
    freedom, independent between rounds; a false alarm needs all of them, so each may be exceeded
    with probability (FALSE_ALARMS / places) ** (1 / rounds).
    """
    rounds = min((len(one) for one in values.values()), default=0)
    if len(values) < 2 or not rounds:
        return {}
    ratios = {
        name: [
            log(own[k]) - log(median([v[k] for other, v in values.items() if other != name]))
            for k in range(rounds)
        ]
        for name, own in values.items()
    }
    noise = spread([one - median(own) for own in ratios.values() for one in own], 0.0)
    each = min(0.5, (FALSE_ALARMS / len(values)) ** (1.0 / rounds))
    limit = -math.log1p(-PEER_FLOOR) + noise * student_quantile(each, NU)
    return {
        name: Compared(ratio=math.exp(median(own)), bound=math.exp(-limit), slow=max(own) < -limit)
        for name, own in ratios.items()
    }


def confirming_limit(slow: Sequence[float], reference: Sequence[float]) -> float:
    """Logarithm by which the median of a later measurement must be below that of others to be slow
    as well: a third of what the slow ones lost, as both of a pair may be slow; PEER_FLOOR at the
    least, three quarters at the most. What is slow among peers keeps the rate of false alarms; this
    says whose it is.
    """
    between = (log(median(reference)) - log(median(slow))) / 3.0
    return min(math.log(4.0), max(-math.log1p(-PEER_FLOOR), between))
