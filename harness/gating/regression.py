"""Whether a metric has become worse than its baseline by more than the tolerance: a rank comparison
of two samples.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError
from trainchaos.chaos.stats import LEVEL, pairs_to_settle, shift_bounds, shift_rank
from trainchaos.chaos.units import interval
from trainchaos.harness.gating.clauses import ClauseDecision, by_bounds
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.samples import per_arm
from trainchaos.harness.judge.verdict.gates import quantity

TIME_SHARE = 0.20
TIME_FLOOR_S = 0.010
RATIO_SHARE = 0.10
SEEN = 0.9
"""How often the change that is stated is seen."""
MOST_DRAWS, MOST_PAIRS = 400, 200_000
_TOLERANCE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(%?)\s*")


class ToleranceError(ChaosError):
    """A tolerance that cannot be read."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How much worse is tolerated: ``share`` of the baseline's value plus ``floor``, in the
    metric's unit.
    """

    share: float = 0.0
    floor: float = 0.0
    unit: str = ""

    @property
    def words(self) -> str:
        """`` by more than 20 % and 10 ms``; "" if nothing is tolerated."""
        parts = [f"{self.share * 100:g} %"] if self.share else []
        parts += (
            [f"{self.floor * 1000:g} ms" if self.unit == "s" else f"{self.floor:g} {self.unit}"]
            if self.floor
            else []
        )
        return f" by more than {' and '.join(parts)}" if parts else ""


def tolerance_of(unit: str, share: float | None = None) -> Tolerance:
    """The tolerance of a metric in ``unit``. By default 20 % and 10 ms for times, 10 % for ratios
    and rates, nothing for counts, which the seed decides.

    It covers what changes between two runs of the same test, which no number of repeats within one
    run shows: docs/ci.md says how to measure it, and what was measured.
    """
    if unit in ("s", "ms"):
        floor = TIME_FLOOR_S if unit == "s" else TIME_FLOOR_S * 1e3
        return Tolerance(share=TIME_SHARE if share is None else share, floor=floor, unit=unit)
    counted = unit not in ("ratio", "samples/s")
    usual = 0.0 if counted else RATIO_SHARE
    return Tolerance(share=usual if share is None else share, unit=unit)


def parse_share(text: str) -> float:
    """``20%`` or ``0.2``, as a share. Raises ToleranceError for anything else, and for 100 % or
    more.
    """
    match = _TOLERANCE.fullmatch(text)
    if match is None:
        raise ToleranceError(f"{text!r} is not a tolerance", hint="write 10% or 0.1, or METRIC=10%")
    share = float(match[1]) / (100 if match[2] else 1)
    if share >= 1:
        raise ToleranceError(
            f"a tolerance of {text} gates nothing",
            hint="write a share below 1, such as 10% or 0.1",
        )
    return share


def is_open(now: Metric, then: Metric, tolerance: Tolerance) -> bool:
    """Whether chance can decide. It cannot if all values of both are equal, which no sample of them
    could call worse (such comparisons take no share of the level: Tarone 1990).
    """
    return len({*now.values, *then.values}) > 1 and bool(now.values)


def compare(
    now: Metric, then: Metric, tolerance: Tolerance, level: float, green: float = LEVEL
) -> ClauseDecision:
    """Judge by the bounds of the shift between ``now`` and what is tolerated of ``then``.

    It fails if the values now are shown to be worse, as a whole, than the baseline's with the
    tolerance added (a one-sided Mann-Whitney test: it assumes no distribution and needs no median);
    it passes if they are shown to be no worse. ``level``: how often it may fail by chance alone,
    ``green``: how often it may pass by chance alone. Each arm counts once, with the median of its
    values. A value that never recovered is worse than any that did, and equal to another one.
    """
    if not now.values:
        return ClauseDecision(
            verdict="inconclusive", detail=f"no value now, {then.counted} in the baseline"
        )
    now, then = _by_arm(now), _by_arm(then)
    n, m = now.n, then.n
    worse = [_beyond(a, b, then.better, tolerance) for a in now.values for b in then.values]
    bounds = shift_bounds(worse, n, m, level, green)
    clock = now.clock_bound + then.clock_bound * (1 + tolerance.share)
    known = _known(now, then)
    if (settled := by_bounds(bounds, clock, now.unit, known)) is not None:
        return settled
    above = sum(1.0 if d > 0 else 0.0 if d < 0 else 0.5 for d in worse) / len(worse)
    tied = all(d <= 0 for d in worse)
    needed = pairs_to_settle(0.0 if tied else above, level if above > 0.5 else green)
    if needed is None:
        known += "; no reasonable number of repeats would settle it: it lies at what is tolerated"
    return ClauseDecision(
        verdict="inconclusive", detail=known, needed=None if needed is None else max(needed, n + 1)
    )


def _by_arm(metric: Metric) -> Metric:
    values = per_arm(metric.values, metric.arms)
    arms = {"values": values, "n": len(values), "arms": [], "of": metric.of_arms}
    return metric.model_copy(update={**arms, "median": statistics.median(values)})


def _beyond(now: float, then: float, better: str, tolerance: Tolerance) -> float:
    """How much worse one value is than what is tolerated of another; 0 if neither recovered."""
    if better == "higher":
        return then * (1 - tolerance.share) - tolerance.floor - now
    allowed = then * (1 + tolerance.share) + tolerance.floor
    return 0.0 if math.isinf(now) and math.isinf(allowed) else now - allowed


def _known(now: Metric, then: Metric) -> str:
    """Both medians, and the relation of the samples: the median of all ratios with its bounds, if
    there are ratios.
    """
    text = f"{quantity(then.median, then.unit)} in the baseline (n={then.counted}), "
    text += f"{quantity(now.median, now.unit)} now (n={now.counted})"
    finite = all(map(math.isfinite, [*now.values, *then.values]))
    if finite and min(then.values) > 0:
        ratios = sorted(a / b for a in now.values for b in then.values)
        text += f": {statistics.median(ratios):.3g} times"
        if rank := shift_rank(now.n, then.n, 0.025):
            text += f" {interval((ratios[rank - 1], ratios[-rank]))}"
    lost = sum(map(math.isinf, now.values))
    before = sum(map(math.isinf, then.values))
    return text + (f"; {lost} never recovered now, {before} then" if lost or before else "")


def least_seen(now: Metric, then: Metric, tolerance: Tolerance, level: float) -> float | None:
    """The smallest change for the worse, as a share of the baseline, that such a comparison shows
    with probability SEEN; infinite if no change would be; None if it cannot be said, as a value is
    0 or infinite.

    By the bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 25:
    power of a test): both samples are drawn again with replacement, from the values of both, each
    relative to its own median and spread to the variance that it has by n - 1, and the test of
    ``compare`` is applied. For a pair of a value now and one of the baseline a change
    by the factor f exceeds what is tolerated from some f on, so that the smallest f which the test
    shows is an order statistic of these, without a search. The seed is fixed: the same values give
    the same answer.
    """
    ours, theirs = per_arm(now.values, now.arms), per_arm(then.values, then.arms)
    n, m = len(ours), len(theirs)
    if not n or not all(0 < value < math.inf for value in (*ours, *theirs)):
        return None
    rank = shift_rank(n, m, level)
    if not rank:
        return math.inf
    usual = statistics.median(theirs)
    pool = [usual * value for value in (*_relative(ours), *_relative(theirs))]
    clock = now.clock_bound + then.clock_bound * (1 + tolerance.share)
    draws = max(50, min(MOST_DRAWS, MOST_PAIRS // (n * m)))
    drawn = np.array(random.Random(17).choices(pool, k=draws * (n + m))).reshape(draws, n + m)
    mine, before = drawn[:, None, :n], drawn[:, n:, None]
    better = -1 if then.better == "higher" else 1
    allowed = before * (1 + better * tolerance.share) + better * (tolerance.floor + clock)
    factors = better * (allowed / mine).reshape(draws, n * m)
    found = np.partition(factors, -rank)[:, -rank] - better
    least = float(np.sort(found)[math.ceil(SEEN * draws) - 1])
    return math.inf if better < 0 and least >= 1 else least


def _relative(values: Sequence[float]) -> list[float]:
    middle, n = statistics.median(values), len(values)
    spread = math.sqrt(n / (n - 1)) if n > 1 else 1.0
    return [(value / middle) ** spread for value in values]
