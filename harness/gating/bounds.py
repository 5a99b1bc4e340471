"""Distribution-free confidence bounds: of a quantile by order statistics, of the shift between two
samples by ranks; and the number of values that would settle an open question. Pure, standard
library only; values are assumed to be independent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

LEVEL = 0.05
"""How often a gate may be wrong when it fails something."""
POWER = 0.8
MOST_VALUES = 1000
EXACT_PAIRS = 2500


def quantile_bounds(
    values: Sequence[float], quantile: float, lower_level: float = LEVEL, upper_level: float = LEVEL
) -> tuple[float | None, float | None]:
    """One-sided bounds of a quantile, each wrong with at most its own level; None if there are too
    few values for one.

    Both with level 0.025 are the 95 % interval of ``harness.judge.measure.measure.median_ci95`` for
    the median (David and Nagaraja, "Order Statistics", 3rd ed., section 7.1); ties only make them
    safer.
    """
    ordered = sorted(values)
    low, high = quantile_ranks(len(ordered), quantile, lower_level, upper_level)
    return (ordered[low - 1] if low else None, ordered[high - 1] if high <= len(ordered) else None)


@lru_cache(maxsize=4096)
def quantile_ranks(
    n: int, quantile: float, lower_level: float, upper_level: float
) -> tuple[int, int]:
    """Ranks, from 1, of the values that bound a quantile from below (0: none) and from above (n +
    1: none).

    The k-th smallest of n is above the quantile with probability P(Bin(n, q) < k), below it with
    P(Bin(n, q) >= k).
    """
    cdf = list(accumulate(_binomial(n, quantile)))
    low = sum(1 for total in cdf[:n] if total <= lower_level)
    high = next((k for k in range(1, n + 1) if 1.0 - cdf[k - 1] <= upper_level), n + 1)
    return low, high


@lru_cache(maxsize=1024)
def values_to_settle(
    breaking: int, n: int, quantile: float, lower_level: float, upper_level: float = LEVEL
) -> int | None:
    """Number of values after which a limit on a quantile is decided with probability POWER, if
    values break it as often as ``breaking`` of ``n`` did; None: more than MOST_VALUES, as the limit
    is too near.

    Exact: an upper limit is certainly broken when fewer values than the lower bound's rank meet it,
    and held when at least the upper bound's rank do; the number that do is binomial. The chance of
    breaking is taken as (b + 1/2) / (n + 1), the mean under Jeffreys' prior, so that none in three
    does not count as never.
    """
    meets = 1.0 - (breaking + 0.5) / (n + 1)
    for size in _sizes(n):
        low, high = quantile_ranks(size, quantile, lower_level, upper_level)
        chances = list(_binomial(size, meets))
        if math.fsum(chances[:low]) + math.fsum(chances[high:]) >= POWER:
            return size
    return None


def next_beyond(n: int) -> float:
    """The largest probability that the next of n + 1 exchangeable values lies beyond all n before
    it: 1 / (n + 1).

    A distribution-free prediction bound (Hahn, Meeker and Escobar, "Statistical Intervals", 2nd
    ed., section 5.4): of n + 1 values in random order, the last is as likely the largest as any
    other.
    """
    return 1.0 / (n + 1)


def values_to_predict(level: float) -> int:
    """The fewest values whose worst bounds the next value with that level: 19 for 5 %."""
    return math.ceil(1.0 / level - 1e-9) - 1


@lru_cache(maxsize=4096)
def shift_rank(n: int, m: int, level: float) -> int:
    """Which of the n x m differences between two samples, counted from an end, bounds their shift;
    0: none.

    The largest k with P(U < k) <= level under the null distribution of the Mann-Whitney statistic
    (Hollander, Wolfe and Chicken, "Nonparametric Statistical Methods", 3rd ed., section 4.3): exact
    up to EXACT_PAIRS pairs, beyond that its normal approximation with a correction for continuity.
    Ties only make it safer (Noether 1967).
    """
    if n < 1 or m < 1:
        return 0
    if n * m > EXACT_PAIRS:
        spread = math.sqrt(n * m * (n + m + 1) / 12)
        return max(0, math.floor(n * m / 2 + 0.5 + spread * statistics.NormalDist().inv_cdf(level)))
    allowed, seen, rank = level * math.comb(n + m, n), 0, 0
    for count in _mann_whitney_counts(n, m):
        seen += count
        if seen > allowed:
            break
        rank += 1
    return rank


def shift_bounds(
    differences: Sequence[float],
    n: int,
    m: int,
    lower_level: float = LEVEL,
    upper_level: float = LEVEL,
) -> tuple[float | None, float | None]:
    """One-sided bounds of a shift from all ``n * m`` differences of two samples; None if there are
    too few values for one.
    """
    ordered = sorted(differences)
    low, high = shift_rank(n, m, lower_level), shift_rank(n, m, upper_level)
    return (ordered[low - 1] if low else None, ordered[-high] if high else None)


def pairs_to_settle(above: float, level: float) -> int | None:
    """Number of values that each of two samples needs to be told apart with probability POWER;
    None: they are too similar.

    ``above``: share of the pairs in which the first is above the second, ties counted half.
    Noether's formula (1987, "Sample size determination for some common nonparametric tests"): N =
    (z_level + z_power)^2 / (12 c (1 - c) (p - 1/2)^2) for both together, here with c = 1/2; at
    least as many as can decide anything at all.
    """
    normal = statistics.NormalDist()
    needed = (normal.inv_cdf(1 - level) + normal.inv_cdf(POWER)) ** 2
    distance = abs(above - 0.5)
    if distance < math.sqrt(needed / (6 * MOST_VALUES)):
        return None
    least = next(size for size in range(1, MOST_VALUES) if shift_rank(size, size, level))
    return max(least, math.ceil(needed / (6 * distance**2)))


def _sizes(n: int) -> Iterator[int]:
    size = n + 1
    while size <= MOST_VALUES:
        yield size
        size += max(1, size // 12)


def _binomial(n: int, p: float) -> Iterator[float]:
    """Probabilities of 0 to n successes, by logarithms, as 2**n soon overflows a float."""
    if p <= 0.0 or p >= 1.0:
        sure = 0 if p <= 0.0 else n
        yield from (1.0 if k == sure else 0.0 for k in range(n + 1))
        return
    whole, yes, no = math.lgamma(n + 1), math.log(p), math.log1p(-p)
    for k in range(n + 1):
        ways = whole - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        yield math.exp(ways + k * yes + (n - k) * no)


def _mann_whitney_counts(n: int, m: int) -> list[int]:
    """Numbers of orders of n and m values in which the first is above the second in 0, 1, 2, ...
    pairs, up to half of the pairs: coefficients of the Gaussian binomial, the product over i to n
    of (1 - x^(m+i)) / (1 - x^i).
    """
    top = n * m // 2
    counts = [1] + [0] * top
    for i in range(1, n + 1):
        for at in range(top, m + i - 1, -1):
            counts[at] -= counts[at - m - i]
        for at in range(i, top + 1):
            counts[at] += counts[at - i]
    return counts
