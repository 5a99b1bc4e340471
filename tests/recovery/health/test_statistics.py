"""Thresholds and estimates: against known values, and against what they promise."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from trainchaos.chaos.stats import student_tail
from trainchaos.recovery.health.estimates import (
    CLIP,
    SLACK,
    STUDENT_MAD,
    THETA,
    Blocks,
    DropCusum,
    autocorrelation,
    median,
    of_others,
    spread,
    without_trend,
)
from trainchaos.recovery.health.readings import Place, Reading


def test_wild_values_move_neither_level_nor_scale() -> None:
    draw = random.Random(1)
    values = [draw.gauss(10.0, 1.0) for _ in range(400)]
    wild = [value if i % 5 else 1e12 for i, value in enumerate(values)]
    assert median(wild) == pytest.approx(10.0, abs=0.5)
    assert spread(wild, median(wild)) == pytest.approx(spread(values, median(values)), rel=0.5)
    assert math.isnan(median([]))
    assert spread([5.0] * 9, 5.0) == 0.0


def test_a_scale_is_not_taken_to_be_too_small() -> None:
    draw = random.Random(2)
    small = 0
    for _ in range(300):
        values = [draw.gauss(0.0, STUDENT_MAD / 0.6745) for _ in range(64)]
        small += spread(values, median(values)) < 1.0
    assert small <= 300 * 0.01 + 3


def test_autocorrelation_is_found_and_not_exceeded_by_one_value() -> None:
    draw = random.Random(4)
    values, last = [], 0.0
    for _ in range(2000):
        last = 0.6 * last + draw.gauss(0.0, 1.0)
        values.append(last)
    assert autocorrelation(values, 0.0) == pytest.approx(0.6, abs=0.12)
    values[1000] = 1e9
    assert autocorrelation(values, 0.0) == pytest.approx(0.6, abs=0.12)
    assert autocorrelation([draw.gauss(0.0, 1.0) for _ in range(2000)], 0.0) < 0.15
    assert autocorrelation([1.0] * 50, 1.0) == autocorrelation([], 0.0) == 0.0


def test_a_trend_is_taken_out() -> None:
    draw = random.Random(5)
    level, distances = without_trend([0.1 * i + draw.gauss(0.0, 1.0) for i in range(500)])
    assert level == pytest.approx(50.0, abs=0.5)
    assert median([abs(one) for one in distances]) == pytest.approx(0.67, abs=0.15)
    assert without_trend([3.0]) == (3.0, [0.0])


def test_theta_solves_walds_identity() -> None:
    """The expectation over Student's t with 3 degrees of freedom, cut off at CLIP."""
    n, width = 2000, 2.0 * CLIP / 2000
    points = [-CLIP + width * i for i in range(n + 1)]
    density = [2.0 / (math.pi * math.sqrt(3.0)) / (1.0 + x * x / 3.0) ** 2 for x in points]
    weights = [width * one for one in density]
    for end in (0, -1):
        weights[end] = weights[end] / 2.0 + student_tail(CLIP, 3.0)
    both = zip(weights, points, strict=True)
    assert math.fsum(w * math.exp(THETA * (x - SLACK)) for w, x in both) == pytest.approx(1.0)


def related_noise(draw: random.Random, r: float) -> Iterator[float]:
    """Autoregressive, its innovations Student's t with 3 degrees of freedom, of scale 1 as a
    whole.
    """
    value, own = 0.0, math.sqrt(1.0 - r * r)
    while True:
        new = draw.gauss(0.0, 1.0) / math.sqrt(draw.gammavariate(1.5, 2.0) / 3.0)
        value = r * value + own * new
        yield value


@pytest.mark.long
@pytest.mark.parametrize("r", [0.0, 0.5, 0.8, 0.9])
def test_a_cusum_of_related_values_alarms_no_more_often_than_it_says(r: float) -> None:
    noise, cusum = related_noise(random.Random(7), r), DropCusum(tail=1 / 300, least=0.0)
    found = sum(cusum.add(next(noise), float(i)) is not None for i in range(60_000))
    assert found <= 200


@pytest.mark.parametrize("r", [0.0, 0.5, 0.8, 0.9])
def test_a_large_drop_is_found_soon_however_related_the_values_are(r: float) -> None:
    noise, cusum = related_noise(random.Random(8), r), DropCusum(tail=3e-6, least=0.05)
    for i in range(112):
        assert cusum.add(0.1 * next(noise), float(i)) is None
    needed = next(
        i for i in range(1, 60) if cusum.add(0.1 * next(noise) - 2.2, 112.0 + i) is not None
    )
    assert needed <= 16, "the first sum alone needs 48 where r is 0.8"


def test_the_median_of_the_others() -> None:
    draw = random.Random(7)
    for n in (3, 4, 5, 8):
        medians = {Place(rank): draw.random() for rank in range(n)}
        for where, found in of_others(medians).items():
            others = [value for one, value in medians.items() if one != where]
            assert found == pytest.approx(median(others))
    assert of_others({Place(0): 1.0, Place(1): 2.0}) == {}


def test_blocks_become_longer_where_readings_are_rarer_and_not_for_a_pause() -> None:
    blocks = Blocks(block_s=1.0, least=5, wanted=20)
    found = [
        block
        for number in range(400)
        for block in blocks.add(Reading(Place(0), "x", 1.0, "s", 0.5 * number))
    ]
    assert blocks.block_s == 10.0
    assert len(found) >= 15
    blocks = Blocks(block_s=1.0, least=5, wanted=20)
    for number in range(2000):
        pause_s = 40.7 * (number // 300)
        list(blocks.add(Reading(Place(0), "x", 1.0, "s", 0.04 * number + pause_s)))
    assert blocks.block_s == 1.0


def test_blocks_close_when_a_later_one_begins() -> None:
    blocks = Blocks(block_s=1.0, least=2)

    def add(rank: int, value: float, time_s: float) -> list[dict[int | None, float]]:
        found = blocks.add(Reading(Place(rank), "x", value, "s", time_s))
        return [{where.rank: one for where, one in block.medians.items()} for block in found]

    assert [add(0, 1.0, 0.1), add(0, 3.0, 0.2), add(1, 9.0, 0.9)] == [[], [], []]
    assert add(0, 5.0, 7.0) == [{0: 2.0}], "rank 1 had one reading"
    assert add(0, 5.0, 3.0) == [], "the clock was set back"
    for odd in (math.nan, math.inf, -math.inf):
        assert add(0, odd, 3.1) == add(0, 1.0, odd) == []
    assert add(0, 7.0, 3.2) == []
    assert add(0, 7.0, -5.0) == []
    assert add(0, 7.0, 1e300) == [{}], "nobody had two"
