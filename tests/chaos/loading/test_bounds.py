"""Confidence bounds against brute force: levels are kept exactly, and predicted sample sizes settle
what they promise.
"""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest

from trainchaos.chaos.scenario.sla import samples_needed
from trainchaos.harness.gating.bounds import (
    EXACT_PAIRS,
    POWER,
    pairs_to_settle,
    quantile_bounds,
    quantile_ranks,
    shift_bounds,
    shift_rank,
    values_to_settle,
)
from trainchaos.harness.judge.measure.measure import median_ci95


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
