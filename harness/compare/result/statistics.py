"""Statistics of few paired runs. Nothing here assumes a distribution, and non-recovery counts as
infinity.

The interval is that of order statistics: those of the paired ratios cover their median with at
least 95 % whatever the noise, which is the sign test turned round. A percentile bootstrap of the
median is narrower with the 5 to 15 pairs of a comparison, and calls equal stacks different in more
than 5 of 100 comparisons. "Different" is said only when all of the interval lies on one side of 1.
Below 6 pairs no such interval exists, and nothing is called different.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from trainchaos.chaos.stats import LEAST_OF_MEDIAN as LEAST_PAIRS
from trainchaos.chaos.stats import POWER, binomial, median_ci95, quantile_ranks
from trainchaos.harness.compare.result.model import Difference

EVERY = "every kind"
"""The family of a ratio over the pairs of all families together, which few repeats of each can
still settle.
"""

OUTLIER_LIMIT = 3.5
OUTLIER_LEAST = 5
OUTLIER_FACTOR = 2.0
MOST_REPETITIONS = 500
_TO_DEVIATION = 0.6745
_MEAN_TO_DEVIATION = 1.253314


def paired_ratio(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, higher_is_better: bool = False
) -> tuple[float | None, tuple[float, float] | None, Difference]:
    """Median of ``theirs / ours`` over the pairs of one seed, its 95 % interval (None below 6
    pairs) and what it says.

    The answer is about ``theirs``: ``faster`` means that it takes less (gives more, where
    ``higher_is_better``), ``only this one recovers`` that it does in every pair and ``ours`` in
    none. A value that never came is infinity; a pair in which neither recovers counts as equal,
    since leaving it out would choose pairs by their result. Values of a seed that only one side has
    are left out. With an even number of pairs the median is the geometric mean of the middle two,
    so that swapping the sides gives the reciprocal. Raises ValueError for a negative value or one
    that is not a number.
    """
    logs = _log_ratios(ours, theirs)
    if not logs:
        return None, None, "too few"
    pairs = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
    mine, other = ([math.isfinite(pair[side]) for pair in pairs] for side in (0, 1))
    if not any(mine) and not any(other):
        return None, None, "neither recovers"
    middle = statistics.median(logs)
    value = _exp(0.0 if math.isnan(middle) else middle)  # nan: between -inf and inf
    interval = median_ci95(logs)
    if interval is None:
        return value, None, "too few"
    low, high = interval
    says: Difference = "faster" if (high < 0) != higher_is_better else "slower"
    if low <= 0 <= high:
        says = "no difference shown"
    elif not any(mine) and all(other):
        says = "only this one recovers"
    elif not any(other) and all(mine):
        says = "only the other recovers"
    return value, (_exp(low), _exp(high)), says


def repetitions_needed(ours: Mapping[int, float], theirs: Mapping[int, float]) -> int | None:
    """How many pairs in all would probably settle an inconclusive comparison: with that many, the
    order statistics exclude equality in 80 of 100 repetitions. None: not within 500, or nothing to
    guess from.

    A guess from the pairs there are: the chance that a pair favours the side that is ahead is taken
    as (favourable + 1) / (pairs + 2), Laplace's rule, and the binomial distribution gives the rest.
    Below 6 pairs there is too little to guess from: then it is the least number that can settle it,
    if all further pairs agree.
    """
    logs = _log_ratios(ours, theirs)
    below, above = sum(value < 0 for value in logs), sum(value > 0 for value in logs)
    ahead = max(below, above)
    if 0 < len(logs) < LEAST_PAIRS:
        sizes = range(LEAST_PAIRS, MOST_REPETITIONS)
        return next(n for n in sizes if _allowed(n) >= len(logs) - ahead)
    if below == above:
        return None
    chance = (ahead + 1) / (len(logs) + 2)
    for n in range(len(logs), MOST_REPETITIONS + 1):
        if math.fsum(binomial(n, 1 - chance)[: _allowed(n) + 1]) >= POWER:
            return n
    return None


def outliers(values: Mapping[int, float]) -> list[int]:
    """Keys of values far from the others, to be flagged and never dropped: 0.6745 |log x - median|
    / MAD over 3.5, and less than half or more than twice the median.

    Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), on logarithms because times
    are skewed to the right; where more than half the values are equal, the mean absolute deviation
    stands in for the median one. The factor keeps 5 to 10 values, whose MAD is often small by
    chance, from being flagged for next to nothing. Nothing is flagged below 5 finite values.
    Infinite values are not: never recovering is an outcome of its own, and is counted as one.
    """
    logs = {key: math.log(value) for key, value in values.items() if 0 < value < math.inf}
    if len(logs) < OUTLIER_LEAST:
        return []
    centre = statistics.median(logs.values())
    apart = {key: abs(value - centre) for key, value in logs.items()}
    spread = statistics.median(apart.values()) / _TO_DEVIATION
    spread = spread or statistics.fmean(apart.values()) * _MEAN_TO_DEVIATION
    least = max(math.log(OUTLIER_FACTOR), OUTLIER_LIMIT * spread)
    return sorted(key for key, far in apart.items() if far > least)


def _log_ratios(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    return [_log_ratio(ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())]


def _log_ratio(ours: float, theirs: float) -> float:
    """Logarithm of theirs / ours; 0 where both are infinite or both 0."""
    if not (ours >= 0 and theirs >= 0):
        raise ValueError(f"a ratio of {theirs} to {ours}: times and shares are 0 or more")
    if ours == theirs:
        return 0.0
    if math.isinf(theirs) or ours == 0:
        return math.inf
    if math.isinf(ours) or theirs == 0:
        return -math.inf
    return math.log(theirs) - math.log(ours)


def _exp(log: float) -> float:
    return math.exp(log) if log < 700 else math.inf


def _allowed(n: int) -> int:
    """How many of ``n`` pairs may point the other way, or be equal, while the interval still
    excludes equality.
    """
    return quantile_ranks(n, 0.5, 0.025, 0.025)[0] - 1
