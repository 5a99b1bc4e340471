"""What the comparison's statistics call different: rarely on equal stacks, and soon on unequal
ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainchaos.harness.compare.result.statistics import (
    OUTLIER_LEAST,
    outliers,
    paired_ratio,
    repetitions_needed,
)

COMPARISONS = 200
TIMES = st.one_of(st.floats(min_value=1e-3, max_value=1e4), st.just(math.inf))


def upper_bound(trials: int, chance: float, confidence: float = 0.95) -> int:
    """Largest count that is not surprising at ``chance``: the quantile of the binomial
    distribution.
    """
    total = 0.0
    for count in range(trials + 1):
        total += math.comb(trials, count) * chance**count * (1 - chance) ** (trials - count)
        if total >= confidence:
            return count
    return trials


def times(
    generator: random.Random, pairs: int, factor: float
) -> tuple[dict[int, float], dict[int, float]]:
    """Recovery times of two stacks as they are here: a level of the pair's own (same fault, same
    moment, same load) that both share, lognormal noise, one in eight twice to tenfold as long, one
    in fifty never.
    """
    ours, theirs = {}, {}
    for seed in range(pairs):
        level = math.exp(generator.gauss(0, 0.4))
        for side, scale in ((ours, 1.0), (theirs, factor)):
            value = scale * level * math.exp(generator.gauss(0, 0.15))
            if generator.random() < 1 / 8:
                value *= 1 + generator.paretovariate(1.2)
            side[seed] = math.inf if generator.random() < 1 / 50 else value
    return ours, theirs


def called_different(pairs: int, factor: float, first: int = 0) -> int:
    """How many of 200 comparisons say that one of the two is faster, or the only one that
    recovers.
    """
    count = 0
    for number in range(first, first + COMPARISONS):
        ours, theirs = times(random.Random(f"{pairs} {factor} {number}"), pairs, factor)
        says = paired_ratio(ours, theirs)[2]
        count += says not in ("no difference shown", "too few", "neither recovers")
    return count


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("pairs", [6, 10, 17])
def test_equal_stacks_are_called_different_in_at_most_five_of_a_hundred(pairs: int) -> None:
    assert called_different(pairs, 1.0) <= upper_bound(COMPARISONS, 0.05)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("pairs", "share"), [(10, 0.6), (17, 0.9)])
def test_a_stack_that_takes_twice_as_long_is_found(pairs: int, share: float) -> None:
    assert called_different(pairs, 2.0) >= share * COMPARISONS


def pair(ours: list[float], theirs: list[float]) -> tuple[Mapping[int, float], Mapping[int, float]]:
    return dict(enumerate(ours)), dict(enumerate(theirs))


def test_the_answer_is_about_theirs() -> None:
    value, interval, says = paired_ratio(
        *pair([1.0] * 8, [2.0, 2.1, 2.2, 1.9, 2.0, 1.8, 3.0, 2.05])
    )
    assert value == pytest.approx(math.sqrt(2.0 * 2.05)) and says == "slower"
    assert interval == pytest.approx((1.8, 3.0))
    assert paired_ratio(*pair([2.0] * 6, [1.0] * 6))[2] == "faster"
    assert paired_ratio(*pair([0.5] * 6, [0.9] * 6), higher_is_better=True)[2] == "faster"


def test_never_recovering_is_an_infinite_ratio() -> None:
    never = [math.inf] * 7
    assert paired_ratio(*pair([1.0] * 7, never)) == (
        math.inf,
        (math.inf, math.inf),
        "only the other recovers",
    )
    assert paired_ratio(*pair(never, [1.0] * 7)) == (
        0.0,
        (0.0, 0.0),
        "only this one recovers",
    )
    assert paired_ratio(*pair(never, never)) == (None, None, "neither recovers")
    mixed = paired_ratio(*pair([1.0] * 7, [3.0, *never[1:]]))
    assert mixed == (math.inf, (pytest.approx(3.0), math.inf), "slower")
    assert paired_ratio(*pair([math.inf, 1.0] * 4, [1.0, math.inf] * 4))[2] == "no difference shown"


def test_few_pairs_say_nothing_however_far_apart() -> None:
    value, interval, says = paired_ratio(*pair([1.0] * 5, [50.0] * 5))
    assert (value, interval, says) == (pytest.approx(50.0), None, "too few")
    assert paired_ratio({1: 1.0}, {2: 1.0}) == (None, None, "too few")


def test_only_seeds_that_both_have_are_pairs() -> None:
    ours = {seed: 1.0 for seed in range(8)}
    theirs = {seed: 2.0 for seed in range(2, 8)} | {99: 0.001}
    assert paired_ratio(ours, theirs)[0] == pytest.approx(2.0)


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_what_is_no_time_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        paired_ratio({1: 1.0}, {1: bad})


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.integers(0, 30), st.tuples(TIMES, TIMES), min_size=6, max_size=14))
def test_swapping_the_sides_gives_the_reciprocal(both: dict[int, tuple[float, float]]) -> None:
    ours = {key: value[0] for key, value in both.items()}
    theirs = {key: value[1] for key, value in both.items()}
    one, other = paired_ratio(ours, theirs)[0], paired_ratio(theirs, ours)[0]
    assert (one is None) == (other is None)
    if one is not None and other is not None and 0 < one < math.inf:
        assert one * other == pytest.approx(1.0)


def test_outliers_are_named_by_their_seed() -> None:
    usual = {seed: 1.0 + 0.02 * seed for seed in range(8)}
    assert outliers(usual) == []
    assert outliers(usual | {42: 9.0}) == [42]
    assert outliers(usual | {42: math.inf}) == []
    assert outliers({seed: 1.0 for seed in range(9)} | {9: 2.5}) == [9]
    assert outliers({seed: 1.0 + seed * 1e-6 for seed in range(9)} | {9: 1.5}) == []
    assert outliers({seed: 1.0 for seed in range(OUTLIER_LEAST - 2)} | {9: 1e6}) == []


def test_how_many_pairs_would_settle_it() -> None:
    assert repetitions_needed(*pair([1.0] * 3, [2.0] * 3)) == 6
    assert repetitions_needed(*pair([1.0] * 3, [2.0, 2.0, 0.5])) == 9
    assert repetitions_needed(*pair([1.0, 2.0] * 3, [2.0, 1.0] * 3)) is None
    assert repetitions_needed({}, {}) is None
    close = repetitions_needed(*pair([1.0] * 10, [2.0] * 6 + [0.5] * 4))
    clear = repetitions_needed(*pair([1.0] * 10, [2.0] * 9 + [0.5]))
    assert clear is not None and close is not None and clear < close
