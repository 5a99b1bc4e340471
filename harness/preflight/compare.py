"""What rates say, beside peers of this machine and beside a baseline, at a stated rate of false
alarms. Rates are compared by their logarithms: what slows a device or link down does so by a
factor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from trainchaos.chaos.stats import student_quantile
from trainchaos.harness.preflight.baseline import Baseline
from trainchaos.harness.preflight.check import HOST, Finding, Rate
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


BASELINE_FLOOR = 0.10
"""Share below the baseline that is left alone, as the detector ``slow-link`` does."""
LATENCY_FLOOR = 2.0
"""Times the baseline that a latency may have: it is as much the queue's before a device as the
device's. On 2 shared cores the median of a store's round trips was 1.2 times that of a quiet minute
(spread of the repeats: 1 %).
"""
Found = Mapping[tuple[str, str], Finding]
"""Findings by check and place."""


def with_peers(findings: Found, rates: Sequence[Rate]) -> Found:
    """The findings, with those places unfit that are slow among the places of this machine."""
    alike: dict[tuple[str, str], list[Rate]] = defaultdict(list)
    for rate in rates:
        if rate.peers:
            alike[rate.check, rate.metric].append(rate)
    worse = []
    for group in alike.values():
        compared = slow_among({one.place: one.rounds for one in group})
        for rate in group:
            beside = compared.get(rate.place)
            if beside is not None and beside.slow:
                value = median(rate.rounds)
                peers = value / beside.ratio if beside.ratio > 0.0 else math.inf
                worse.append((rate, "its peers", peers, peers * beside.bound))
    return _with_worse(findings, worse)


def with_baseline(findings: Found, rates: Sequence[Rate], baseline: Baseline) -> Found:
    """The findings, with those places unfit that are worse than the baseline allows; without
    anything in common, a finding that says so.
    """
    pairs = [(rate, was) for rate in rates if (was := baseline.find(rate)) is not None]
    if not pairs:
        nothing = Finding(
            check="baseline",
            place=HOST,
            state="unmeasured",
            said="the baseline has no rate of what was measured here",
            todo="save another with --save-baseline",
        )
        return {**findings, (nothing.check, nothing.place): nothing}
    worse = []
    for rate, was in pairs:
        level, limit = baseline_limit(was.values, len(pairs), latency=not rate.high_is_good)
        bound = math.exp(level - limit if rate.high_is_good else level + limit)
        value = median(rate.rounds)
        if value < bound if rate.high_is_good else value > bound:
            worse.append((rate, "in the baseline", median(was.values), bound))
    return _with_worse(findings, worse)


def baseline_limit(
    repeats: Sequence[float], comparisons: int, *, latency: bool = False
) -> tuple[float, float]:
    """(level, limit), both logarithms: a new value further than ``limit`` from the level, to the
    bad side, is a false alarm with probability FALSE_ALARMS / comparisons at the most.

    Prediction limit of one new value of a normal distribution of which the mean and the variance
    are those of ``repeats``, two at the least (Hahn and Meeker, Statistical Intervals, 1991, sec.
    4.7): t s sqrt(1 + 1/n), n - 1 degrees of freedom; BASELINE_FLOOR at the least, of a latency
    LATENCY_FLOOR.
    """
    n = len(repeats)
    logs = [log(one) for one in repeats]
    level = math.fsum(logs) / n
    scale = math.sqrt(math.fsum((one - level) ** 2 for one in logs) / (n - 1))
    t = student_quantile(FALSE_ALARMS / max(1, comparisons), n - 1)
    floor = math.log(LATENCY_FLOOR) if latency else -math.log1p(-BASELINE_FLOOR)
    return level, max(floor, t * scale * math.sqrt(1.0 + 1.0 / n))


def _with_worse(findings: Found, worse: Iterable[tuple[Rate, str, float, float]]) -> Found:
    """With places unfit for a rate that is worse than its bound; what failed before stays first.
    ``worse``: the rate, what it is beside, the value there, and the bound.
    """
    found = dict(findings)
    for rate, beside, other, bound in worse:
        at, value = (rate.check, rate.place), median(rate.rounds)
        side = "at least" if rate.high_is_good else "at most"
        said = (
            f"{rate.metric} {_number(value, rate.unit)}, {beside} {_number(other, rate.unit)},"
            f" {side} {_number(bound, rate.unit)}"
        )
        before = found.get(at, Finding(check=rate.check, place=rate.place, said=""))
        if before.state == "unfit":
            found[at] = replace(before, said=f"{before.said}; {said}")
            continue
        found[at] = replace(
            before,
            state="unfit",
            said=said,
            todo=rate.todo,
            measured=value,
            bound=bound,
            unit=rate.unit,
            evidence={**before.evidence, "rounds": list(rate.rounds)},
        )
    return found


def _number(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if abs(log(abs(value))) < 6.9 else f"{value:.0f} {unit}"
