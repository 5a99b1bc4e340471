"""Statistics against exact sums and scipy, and against what they promise: levels are kept
exactly, and predicted sample sizes settle.
"""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest

from trainchaos.chaos.scenario.sla import samples_needed
from trainchaos.chaos.stats import (
    EXACT_PAIRS,
    POWER,
    beta_share,
    clopper_pearson,
    pairs_to_settle,
    percentile,
    poisson_upper,
    predicted_tail,
    quantile_bounds,
    quantile_ranks,
    shift_bounds,
    shift_rank,
    student_quantile,
    values_to_settle,
)


def at_most(k: int, n: int, p: Fraction) -> Fraction:
    """P(Bin(n, p) <= k), in whole numbers."""
    terms = (math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    return sum(terms, start=Fraction(0))


@pytest.mark.parametrize("quantile", [Fraction(1, 2), Fraction(9, 10), Fraction(1, 10)])
@pytest.mark.parametrize("level", [0.05, 0.004])
def test_ranks_keep_their_level_and_waste_none(quantile: Fraction, level: float) -> None:
    for n in (1, 2, 5, 8, 29, 30, 60):
        low, high = quantile_ranks(n, float(quantile), level, level)
        assert low == 0 or at_most(low - 1, n, quantile) <= level
        assert low == n or at_most(low, n, quantile) > level
        assert high == n + 1 or 1 - at_most(high - 1, n, quantile) <= level
        assert high == 1 or 1 - at_most(high - 2, n, quantile) > level


@pytest.mark.parametrize("aggregate", ["p90", "p95"])
def test_a_quantile_has_an_upper_bound_from_the_values_its_clause_needs(aggregate: str) -> None:
    need, quantile = samples_needed(aggregate), float(aggregate[1:]) / 100
    assert quantile_ranks(need, quantile, 0.05, 0.05)[1] == need
    assert quantile_ranks(need - 1, quantile, 0.05, 0.05)[1] == need  # one beyond the last: none


def test_infinite_values_bound_as_the_largest_do() -> None:
    assert quantile_bounds([1.0] * 4 + [math.inf] * 8, 0.5) == (1.0, math.inf)


def test_beyond_the_exact_pairs_the_rank_is_no_bolder() -> None:
    n = math.isqrt(EXACT_PAIRS)
    for level in (0.05, 0.005, 0.0005):
        exact, normal = shift_rank(n, n, level), shift_rank(n, n + 1, level)
        assert exact - n / 2 <= normal <= exact + n / 2 + 2
    assert shift_rank(0, 5, 0.05) == 0


@pytest.mark.parametrize("breaking", [0, 1, 4, 5])
def test_that_many_values_settle_a_limit_that_often(breaking: int) -> None:
    n, level, rng = 5, 0.01, random.Random(11)
    size = values_to_settle(breaking, n, 0.5, level)
    assert size is not None and size > n
    chance, settled = (breaking + 0.5) / (n + 1), 0
    for _ in range(2000):
        values = [2.0 if rng.random() < chance else 0.0 for _ in range(size)]
        low, high = quantile_bounds(values, 0.5, level)
        settled += (low is not None and low > 1) or (high is not None and high <= 1)
    assert settled / 2000 >= POWER - 0.03


def test_a_limit_on_the_median_itself_is_never_settled() -> None:
    assert values_to_settle(10, 20, 0.5, 0.01) is None
    assert pairs_to_settle(0.5, 0.05) is None


def test_that_many_pairs_tell_two_apart_that_often() -> None:
    rng, found = random.Random(3), 0
    wide = [(rng.gauss(1, 1), rng.gauss(0, 1)) for _ in range(20_000)]
    size = pairs_to_settle(sum(a > b for a, b in wide) / len(wide), 0.01)
    assert size is not None
    for _ in range(400):
        a, b = [rng.gauss(1, 1) for _ in range(size)], [rng.gauss(0, 1) for _ in range(size)]
        low, _ = shift_bounds([x - y for x in a for y in b], size, size, 0.01)
        found += low is not None and low > 0
    assert found / 400 >= POWER - 0.06


def test_fewer_pairs_than_can_decide_anything_are_never_promised() -> None:
    size = pairs_to_settle(1.0, 0.001)
    assert size is not None and shift_rank(size, size, 0.001) >= 1


# --- tails


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile(range(1, 101), 0.99) == 99
    assert percentile([1.0, 2.0], 0.0) == 1.0 and math.isnan(percentile([], 0.5))


def test_scipy_says_the_same() -> None:
    scipy = pytest.importorskip("scipy")
    from scipy import special
    from scipy import stats as known

    assert scipy.__version__
    for a, b in itertools.product((0.5, 1.0, 3.5, 40.0, 2000.0), repeat=2):
        for x in (1e-9, 0.01, 0.3, 0.5, 0.97, 1.0):
            assert beta_share(a, b, x) == pytest.approx(special.betainc(a, b, x), rel=1e-9)
    for degrees in (1, 3, 4, 17, 199, 5000):
        for tail in (0.4, 0.025, 5e-4, 1e-12):
            assert student_quantile(tail, degrees) == pytest.approx(
                known.t.isf(tail, degrees), rel=1e-9
            )
    for k, n in ((0, 10), (3, 4), (17, 900), (900, 900), (2, 5000)):
        assert clopper_pearson(k, n) == pytest.approx(
            tuple(known.binomtest(k, n).proportion_ci(0.95, "exact")), abs=1e-9
        )
        assert poisson_upper(k) == pytest.approx(known.chi2.isf(0.05, 2 * k + 2) / 2, rel=1e-9)
        assert predicted_tail(k + 1, n, 3600.0, 60.0) == pytest.approx(
            known.nbinom.sf(k, n + 0.5, 3600 / 3660), rel=1e-9
        )
    for n, m in ((3, 3), (5, 9), (20, 20)):
        rank = shift_rank(n, m, 0.05)
        below = [
            known.mannwhitneyu(*_apart(n, m, u), alternative="less", method="exact").pvalue
            for u in (rank - 1, rank)
        ]
        assert below[0] <= 0.05 < below[1]


def _apart(n: int, m: int, wins: int) -> tuple[list[float], list[float]]:
    """Two samples in which the first is above the second in so many pairs."""
    second = [float(i) for i in range(m)]
    whole, rest = divmod(wins, m)
    first = [m + 1.0 + i for i in range(whole)]
    first += [rest - 0.5] if len(first) < n else []
    return first + [-1.0 - i for i in range(n - len(first))], second
