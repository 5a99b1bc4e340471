"""Statistics against tables, brute force and scipy, and against what they promise: levels are kept
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
    binomial,
    binomial_tail,
    clopper_pearson,
    median_ci95,
    pairs_to_settle,
    percentile,
    poisson_upper,
    predicted_tail,
    quantile_bounds,
    quantile_ranks,
    shift_bounds,
    shift_rank,
    student_quantile,
    student_tail,
    values_to_settle,
)


def at_most(k: int, n: int, p: Fraction) -> Fraction:
    """P(Bin(n, p) <= k), in whole numbers."""
    terms = (math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    return sum(terms, start=Fraction(0))


@pytest.mark.parametrize("n", range(0, 41))
def test_the_median_has_the_interval_of_its_metric(n: int) -> None:
    values = [random.Random(n).random() for _ in range(n)]
    low, high = quantile_bounds(values, 0.5, 0.025, 0.025)
    assert ((low, high) if low is not None else None) == median_ci95(values)


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


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (4, 5), (6, 2), (5, 5)])
@pytest.mark.parametrize("level", [0.05, 0.2])
def test_shift_rank_is_that_of_all_orders(n: int, m: int, level: float) -> None:
    below = []
    for first in itertools.combinations(range(n + m), n):
        second = [i for i in range(n + m) if i not in first]
        below.append(sum(a > b for a in first for b in second))
    rank = shift_rank(n, m, level)
    assert sum(u < rank for u in below) <= level * len(below)
    assert sum(u < rank + 1 for u in below) > level * len(below)


def test_beyond_the_exact_pairs_the_rank_is_no_bolder() -> None:
    n = math.isqrt(EXACT_PAIRS)
    for level in (0.05, 0.005, 0.0005):
        exact, normal = shift_rank(n, n, level), shift_rank(n, n + 1, level)
        assert exact - n / 2 <= normal <= exact + n / 2 + 2
    assert shift_rank(0, 5, 0.05) == 0


def test_shift_bounds_hold_as_often_as_they_say() -> None:
    rng, wrong = random.Random(5), 0
    for _ in range(1000):
        a, b = ([rng.lognormvariate(0, 0.8) for _ in range(7)] for _ in range(2))
        low, _ = shift_bounds([x - y for x in a for y in b], 7, 7, 0.05)
        wrong += low is not None and low > 0
    assert wrong <= 50 + 3 * math.sqrt(1000 * 0.05 * 0.95)


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


@pytest.mark.parametrize(
    ("degrees", "tail", "t"),
    [
        (1, 0.25, 1.0),
        (2, 0.0005, 31.599),
        (3, 0.25, 0.765),
        (3, 5e-4, 12.924),
        (4, 0.025, 2.776),
        (9, 0.01, 2.821),
        (120, 0.025, 1.980),
    ],
)
def test_quantiles_of_students_t_are_those_of_the_tables(
    degrees: int, tail: float, t: float
) -> None:
    assert student_quantile(tail, degrees) == pytest.approx(t, abs=1e-3)
    assert student_tail(t, degrees) == pytest.approx(tail, rel=1e-2)
    for wrong in (0.0, -1.0, 0.6, math.nan):
        with pytest.raises(ValueError, match="tail"):
            student_quantile(wrong, degrees)


def test_the_far_tail_of_students_t_is_that_of_its_power() -> None:
    for t in (1e3, 1e5, 1e7):
        assert student_tail(t, 3) * t**3 == pytest.approx(2 * 3**1.5 / (3 * math.pi), rel=1e-3)
    assert student_quantile(1e-15, 3) > student_quantile(1e-14, 3)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (1, 3), (2, 7), (5, 10), (19, 20), (3, 3)])
def test_each_end_of_an_interval_leaves_half_the_level(k: int, n: int) -> None:
    """By exact sums of fractions."""
    low, high = (Fraction(end).limit_denominator(10**9) for end in clopper_pearson(k, n))
    if k:
        assert float(1 - at_most(k - 1, n, low)) == pytest.approx(0.025, rel=1e-6)
    if k < n:
        assert float(at_most(k, n, high)) == pytest.approx(0.025, rel=1e-6)
    assert (low == 0, high == 1) == (k == 0, k == n)


@pytest.mark.parametrize(("n", "share"), [(5, 0.5), (40, 0.01), (3000, 0.3)])
def test_a_binomial_tail_is_its_sum(n: int, share: float) -> None:
    chances = binomial(n, share)
    assert math.fsum(chances) == pytest.approx(1.0)
    for count in (0, 1, n // 3, n, n + 1):
        assert binomial_tail(count, n, share) == pytest.approx(
            min(1.0, math.fsum(chances[count:])), rel=1e-9
        )


@pytest.mark.parametrize(
    ("events", "most"), [(0, 2.9957), (1, 4.7439), (2, 6.2958), (10, 16.9622), (50, 63.2871)]
)
def test_what_so_many_events_are_compatible_with(events: int, most: float) -> None:
    """Half of the 95 % quantile of chi squared with 2 (k + 1) degrees of freedom, by tables."""
    assert poisson_upper(events) == pytest.approx(most, abs=6e-5)


def test_a_prediction_from_much_history_is_a_poisson_tail() -> None:
    # 6000 events in 6000 windows: one each.
    poisson = 1.0 - math.exp(-1.0) * sum(1.0 / math.factorial(k) for k in range(4))
    assert predicted_tail(4, 6000, 6000.0, 1.0) == pytest.approx(poisson, rel=1e-2)
    assert predicted_tail(0, 0, 1.0, 1.0) == 1.0
    tails = [predicted_tail(n, 0, 3600.0, 600.0) for n in range(1, 30)]
    assert tails == sorted(tails, reverse=True)
    assert 0.0 < tails[-1] < 1e-20


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
