"""Statistics of few paired runs. Nothing here assumes a distribution, and non-recovery counts as
infinity.

Why an interval of order statistics and not the bootstrap alone: the percentile bootstrap of a
median never leaves the values seen, and with the 5 to 15 pairs of a comparison on a small machine
it is too narrow. It then calls equal stacks different in more than 5 of 100 comparisons (7 % at 6
to 10 pairs of heavy-tailed times, of 1000 simulated ones each;
``tests/harness/compare/test_compare_statistics.py`` shows it). The order statistics of the paired
ratios cover their median with at least 95 % whatever the noise, which is the sign test turned
round. So the interval given is the bootstrap's, widened to that of the order statistics wherever it
is the narrower one, and "different" is said only when all of it lies on one side of 1. Below 6
pairs no such interval exists, and nothing is called different.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

from trainchaos.chaos.stats import LEAST_OF_MEDIAN as LEAST_PAIRS
from trainchaos.chaos.stats import POWER, binomial, median_ci95, quantile_ranks
from trainchaos.harness.compare.result.model import Difference

EVERY = "every kind"
"""The family of a ratio over the pairs of all families together, which few repeats of each can
still settle.
"""

RESAMPLES = 1000
OUTLIER_LIMIT = 3.5
OUTLIER_LEAST = 5
OUTLIER_FACTOR = 2.0
MOST_REPETITIONS = 500
_TO_DEVIATION = 0.6745
_MEAN_TO_DEVIATION = 1.253314


def paired_ratio(
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    *,
    seed: int,
    higher_is_better: bool = False,
) -> tuple[float | None, tuple[float, float] | None, Difference]:
    """Median of ``theirs / ours`` over the pairs of one seed, its 95 % interval (None below 6
    pairs) and what it says.

    The answer is about ``theirs``: ``faster`` means that it takes less (gives more, where
    ``higher_is_better``), ``only this one recovers`` that it does in every pair and ``ours`` in
    none. A value that never came is infinity; a pair in which neither recovers counts as equal,
    since leaving it out would choose pairs by their result. Values of a seed that only one side has
    are left out. ``seed``: of the bootstrap. With an even number of pairs the median is the
    geometric mean of the middle two, so that swapping the sides gives the reciprocal. Raises
    ValueError for a negative value or one that is not a number.
    """
    logs = [_log_ratio(ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())]
    if not logs:
        return None, None, "too few"
    interval = _interval(logs, seed)
    shown = None if interval is None else (_exp(interval[0]), _exp(interval[1]))
    if _never(ours, theirs) and _never(theirs, ours):
        return None, None, "neither recovers"
    return _exp(_middle(sorted(logs))), shown, _says(ours, theirs, interval, higher_is_better)


def bootstrap_interval(logs: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % percentile bootstrap of the median (Efron and Tibshirani 1993, chapter 13), of at least
    one value.
    """
    generator, values = random.Random(seed), sorted(logs)
    medians = sorted(
        _middle(sorted(generator.choices(values, k=len(values)))) for _ in range(RESAMPLES)
    )
    cut = math.floor(0.025 * RESAMPLES)
    return medians[cut - 1], medians[RESAMPLES - cut]


def repetitions_needed(ours: Mapping[int, float], theirs: Mapping[int, float]) -> int | None:
    """How many pairs in all would probably settle an inconclusive comparison: with that many, the
    order statistics exclude equality in 80 of 100 repetitions. None: not within 500, or nothing to
    guess from.

    A guess from the pairs there are: the chance that a pair favours the side that is ahead is taken
    as (favourable + 1) / (pairs + 2), Laplace's rule, and the binomial distribution gives the rest.
    Below 6 pairs there is too little to guess from: then it is the least number that can settle it,
    if all further pairs agree.
    """
    logs = [_log_ratio(ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())]
    below, above = sum(value < 0 for value in logs), sum(value > 0 for value in logs)
    if logs and len(logs) < LEAST_PAIRS:
        against = len(logs) - max(below, above)
        return next(n for n in range(LEAST_PAIRS, MOST_REPETITIONS) if _allowed(n) >= against)
    if below == above:
        return None
    chance = (max(below, above) + 1) / (len(logs) + 2)
    for n in range(len(logs), MOST_REPETITIONS + 1):
        allowed = _allowed(n)
        if math.fsum(binomial(n, 1 - chance)[: allowed + 1]) >= POWER:
            return n
    return None


def outliers(values: Mapping[int, float]) -> list[int]:
    """Keys of values far from the others, to be flagged and never dropped: 0.6745 |log x - median|
    / MAD over 3.5, and less than half or more than twice the median.

    Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), on logarithms because times
    are skewed to the right (on plain values, without the factor, where one is 0 or less); where
    more than half the values are equal, the mean absolute deviation stands in for the median one.
    The factor keeps 5 to 10 values, whose MAD is often small by chance, from being flagged for next
    to nothing. Nothing is flagged below 5 finite values. Infinite values are not: never recovering
    is an outcome of its own, and is counted as one.
    """
    finite = {key: value for key, value in values.items() if math.isfinite(value)}
    if len(finite) < OUTLIER_LEAST:
        return []
    positive = all(value > 0 for value in finite.values())
    scaled = {key: math.log(value) if positive else value for key, value in finite.items()}
    centre = statistics.median(scaled.values())
    apart = {key: abs(value - centre) for key, value in scaled.items()}
    spread = statistics.median(apart.values()) / _TO_DEVIATION
    if spread == 0:
        spread = statistics.fmean(apart.values()) * _MEAN_TO_DEVIATION
    least = math.log(OUTLIER_FACTOR) if positive else 0.0
    return sorted(
        k for k, far in apart.items() if far > max(least, OUTLIER_LIMIT * spread) and spread
    )


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
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    low, high = ordered[half - 1], ordered[half]
    return 0.0 if math.isinf(low) and math.isinf(high) and low != high else (low + high) / 2


def _interval(logs: Sequence[float], seed: int) -> tuple[float, float] | None:
    ordered = median_ci95(logs)
    if ordered is None:
        return None
    resampled = bootstrap_interval(logs, seed)
    return min(ordered[0], resampled[0]), max(ordered[1], resampled[1])


def _allowed(n: int) -> int:
    """How many of ``n`` pairs may point the other way, or be equal, while the interval still
    excludes equality.
    """
    return quantile_ranks(n, 0.5, 0.025, 0.025)[0] - 1


def _never(values: Mapping[int, float], others: Mapping[int, float]) -> bool:
    """Whether no pair has a finite value on this side."""
    return all(math.isinf(values[key]) for key in values.keys() & others.keys())


def _always(values: Mapping[int, float], others: Mapping[int, float]) -> bool:
    return all(math.isfinite(values[key]) for key in values.keys() & others.keys())


def _says(
    ours: Mapping[int, float],
    theirs: Mapping[int, float],
    interval: tuple[float, float] | None,
    higher: bool,
) -> Difference:
    if interval is None:
        return "too few"
    if interval[0] <= 0 <= interval[1]:
        return "no difference shown"
    if _never(ours, theirs) and _always(theirs, ours):
        return "only this one recovers"
    if _never(theirs, ours) and _always(ours, theirs):
        return "only the other recovers"
    return "faster" if (interval[1] < 0) != higher else "slower"
