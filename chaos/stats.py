"""Tails, quantiles and confidence bounds: what verdicts, thresholds and intervals rest on.

Pure, and standard library only: a supervisor imports neither numpy nor scipy. Values are taken to
be independent. Nothing is assumed about distributions, but where a function names one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate

LEVEL = 0.05
"""How often a bound may be wrong, one-sided."""
POWER = 0.8
"""How often the number of values that settles a question does."""
LEAST_OF_MEDIAN = 6
"""With fewer values their median has no interval of 95 %."""
MOST_VALUES = 1000
EXACT_PAIRS = 2500
_ROUNDS = 200
_TINY = 1e-300


def beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22,
    evaluated as Lentz does). Tails of Student's t and of binomial counts are values of it.
    """
    if not 0.0 < x < 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_share(b, a, 1.0 - x)
    size = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(size + a * math.log(x) + b * math.log1p(-x)) / a
    d = 1.0 / (1.0 - (a + b) * x / (a + 1.0) or _TINY)
    c, fraction, m, step = 1.0, d, 0, 0.0
    while abs(step - 1.0) > 1e-14 and m < 10_000:
        m += 1
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        step = 1.0
        for term in (even, odd):
            d = 1.0 / (1.0 + term * d or _TINY)
            c = 1.0 + term / c or _TINY
            step *= c * d
        fraction *= step
    return front * fraction


def student_tail(t: float, degrees: float) -> float:
    """P(T > t) of Student's t, t >= 0."""
    return 0.5 * beta_share(degrees / 2.0, 0.5, degrees / (degrees + t * t))


@cache
def student_quantile(tail: float, degrees: float) -> float:
    """t with P(T > t) = ``tail``. Raises ValueError for a tail that is not in (0, 0.5]."""
    if not 0.0 < tail <= 0.5:
        raise ValueError(f"a tail is in (0, 0.5]: {tail}")
    high = 1.0
    while student_tail(high, degrees) > tail:
        high *= 2.0
    return _first(lambda t: student_tail(t, degrees) <= tail, 0.0, high)


def binomial_tail(count: int, n: int, share: float) -> float:
    """P(K >= ``count``) of ``n`` with probability ``share`` each."""
    if count <= 0:
        return 1.0
    return beta_share(count, n - count + 1, share) if count <= n else 0.0


def binomial(n: int, share: float) -> list[float]:
    """Probabilities of 0 to n successes, by logarithms, as 2**n soon overflows a float."""
    if not 0.0 < share < 1.0:
        return [float(k == (n if share >= 1.0 else 0)) for k in range(n + 1)]
    whole, yes, no = math.lgamma(n + 1), math.log(share), math.log1p(-share)
    ways = (whole - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1))
    return [math.exp(way + k * yes + (n - k) * no) for k, way in enumerate(ways)]


def clopper_pearson(k: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Exact two-sided interval of a probability after k of n, wrong in at most ``level`` (Clopper
    and Pearson 1934): from the p at which k or more are seen with level / 2 to the one at which k
    or fewer are.
    """
    low = _first(lambda p: binomial_tail(k, n, p) >= level / 2, 0.0, 1.0) if k else 0.0
    high = _first(lambda p: binomial_tail(k + 1, n, p) >= 1.0 - level / 2, 0.0, 1.0)
    return low, high if k < n else 1.0


def poisson_upper(events: int, level: float = LEVEL) -> float:
    """The largest mean that is compatible with so many events: the one at which so many or fewer
    are seen with probability ``level`` (Garwood 1936). 3.0 for none: the rule of three.
    """

    def few(mean: float) -> bool:
        logs = (k * math.log(mean) - mean - math.lgamma(k + 1.0) for k in range(events + 1))
        return math.fsum(map(math.exp, logs)) <= level

    return _first(few, float(events), events + 10.0 * math.sqrt(events + 1.0) + 10.0)


def predicted_tail(count: int, events: int, span_s: float, window_s: float) -> float:
    """P(N >= ``count``) in a window, of a Poisson process of which ``events`` were seen in a span
    before it. Its rate is not known, but has the posterior Gamma(events + 1/2, span) of Jeffreys'
    prior, so N is negative binomial (Gelman et al., Bayesian Data Analysis, 3rd ed., sec. 2.6).
    """
    return beta_share(count, events + 0.5, window_s / (span_s + window_s)) if count > 0 else 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank); nan of
    none.
    """
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def median_ci95(values: Sequence[float]) -> tuple[float, float] | None:
    """Distribution-free 95 % interval of the median; None of fewer than LEAST_OF_MEDIAN values,
    where no such interval exists. Infinite values are the largest.
    """
    low, high = quantile_bounds(values, 0.5, 0.025, 0.025)
    return None if low is None or high is None else (low, high)


def quantile_bounds(
    values: Sequence[float], quantile: float, lower_level: float = LEVEL, upper_level: float = LEVEL
) -> tuple[float | None, float | None]:
    """One-sided bounds of a quantile, each wrong with at most its own level; None if there are too
    few values for one (David and Nagaraja, "Order Statistics", 3rd ed., section 7.1). Ties only
    make them safer.
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
    cdf = list(accumulate(binomial(n, quantile)))
    low = sum(1 for total in cdf[:n] if total <= lower_level)
    high = next((k for k in range(1, n + 1) if 1.0 - cdf[k - 1] <= upper_level), n + 1)
    return low, high


def values_to_bound(quantile: float, level: float = LEVEL) -> int:
    """The fewest values of which the largest bounds a quantile from above: it is below the quantile
    with probability q**n (Wilks 1941). 29 for p90, 59 for p95, 299 for p99.
    """
    n = max(1, math.floor(math.log(level) / math.log(quantile)))
    return next(
        size for size in (n, n + 1) if quantile_ranks(size, quantile, level, level)[1] <= size
    )


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
        chances = binomial(size, meets)
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
    allowed = level * math.comb(n + m, n)
    return sum(1 for seen in accumulate(_mann_whitney_counts(n, m)) if seen <= allowed)


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


def _first(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest value in (low, high] from which a condition holds, by bisection."""
    for _ in range(_ROUNDS):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
