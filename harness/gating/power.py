"""How large a change for the worse must be for a comparison with a baseline to see it."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import numpy as np

from trainchaos.chaos.stats import shift_rank
from trainchaos.harness.gating.regression import Tolerance
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.samples import per_arm

SEEN = 0.9
"""How often the change that is stated is seen."""
MOST_DRAWS, MOST_PAIRS = 400, 200_000


def least_seen(now: Metric, then: Metric, tolerance: Tolerance, level: float) -> float | None:
    """The smallest change for the worse, as a share of the baseline, that such a comparison shows
    with probability SEEN; infinite if no change would be; None if it cannot be said, as a value is
    0 or infinite.

    By the bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 25:
    power of a test): both samples are drawn again with replacement, from the values of both, each
    relative to its own median and spread to the variance that it has by n - 1, and the test of
    ``regression.compare`` is applied. For a pair of a value now and one of the baseline a change
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
