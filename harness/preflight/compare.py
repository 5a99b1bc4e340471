"""What rates say: beside peers of this machine, and beside a baseline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from trainchaos.chaos.stats import student_quantile
from trainchaos.harness.preflight.baseline import Baseline
from trainchaos.harness.preflight.checks.bounds import FALSE_ALARMS, log, slow_among
from trainchaos.harness.preflight.checks.findings import HOST, Finding, Rate
from trainchaos.recovery.health.estimates import median

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
