"""What no source should say: every detector takes it, raises nothing, and stays small."""

from __future__ import annotations

import gc
import math
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recovery.health.test_detectors import ALL, METRICS
from trainchaos.recovery.health.detectors.base import Alarm, Detector
from trainchaos.recovery.health.readings import JOB, Place, Reading

MAKES = pytest.mark.parametrize("make", ALL, ids=lambda make: make().what)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
MOST_BYTES = 4 << 20
MILLION = 1_000_000


def readings_of(
    what: str, value: float, time_s: float, rank: int | None, step: int
) -> list[Reading]:
    """A reading of the detector's metric, with a limit where it needs one."""
    where = Place(rank)
    found = [Reading(where, METRICS[what], value, "", time_s, step, f"{value:.0f}")]
    if what == "thermal-limit":
        found.insert(0, Reading(where, "temperature_slowdown", 87.0, "degC", time_s))
    return found


def sound(alarms: list[Alarm]) -> None:
    """Whether each can be shown to somebody."""
    for one in alarms:
        assert one.what
        assert not math.isnan(one.threshold)
        assert math.isfinite(one.since_s)
        str(one.where)


@pytest.mark.slow
@pytest.mark.sample(1)
@MAKES
@given(
    data=st.lists(
        st.tuples(NUMBERS, NUMBERS, st.one_of(st.none(), st.integers(0, 3)), st.integers(-5, 50)),
        max_size=60,
    )
)
def test_any_values_at_any_times(make: Callable[[], Detector], data: list[tuple]) -> None:
    detector = make()
    for value, time_s, rank, step in data:
        readings = readings_of(detector.what, value, time_s, rank, step)
        sound(list(detector.look(readings, time_s)))


@MAKES
def test_a_wild_value_among_many_does_no_harm(make: Callable[[], Detector]) -> None:
    """And things that are the same all the time are well, whatever came before."""
    detector = make()
    for wild in (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -1.0):
        sound(list(detector.look(readings_of(detector.what, wild, 1.0, 0, 1), 1.0)))
    if detector.what == "hang":
        return  # a job that commits nothing is what it looks for
    for second in range(100, 3000):
        for rank in range(4):
            said = detector.look(
                readings_of(detector.what, 50.0, float(second), rank, second), float(second)
            )
            assert not said or second < 1000


@MAKES
def test_a_clock_that_runs_backwards(make: Callable[[], Detector]) -> None:
    detector = make()
    for second in range(2000, -2000, -1):
        for rank in range(3):
            readings = readings_of(detector.what, 50.0, float(second), rank, 4000 - second)
            assert detector.look(readings, float(second)) == []


@MAKES
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_equal_values_and_one_alone(make: Callable[[], Detector], value: float) -> None:
    detector = make()
    assert detector.look(readings_of(detector.what, value, 0.0, None, 0), 0.0) == []
    detector = make()
    for number in range(2000):
        at_s = 0.04 * number
        shown = float(number) if detector.what == "hang" else value
        for rank in range(4):
            assert detector.look(readings_of(detector.what, shown, at_s, rank, number), at_s) == []


@MAKES
def test_peers_that_are_missing(make: Callable[[], Detector]) -> None:
    """Each rank is there for a while, and never three of them at once."""
    detector, draw = make(), random.Random(1)
    if detector.what in ("hang", "digest-mismatch"):
        return  # ranks that commit nothing, or differ from another, are what they look for
    for number in range(4000):
        rank = number // 500
        at_s = 0.04 * number
        value = 50.0 * draw.uniform(0.9, 1.1)
        assert detector.look(readings_of(detector.what, value, at_s, rank, number), at_s) == []


@pytest.mark.long
@MAKES
def test_a_million_samples_take_bounded_memory(make: Callable[[], Detector]) -> None:
    """Of 8 ranks in turn, and with an odd one of a rank that nobody knows now and then."""
    detector, draw = make(), random.Random(2)
    metric = METRICS[detector.what]
    values = [50.0 * draw.uniform(0.5, 1.5) for _ in range(997)]

    def some(first: int, count: int) -> Iterator[Reading]:
        for number in range(first, first + count):
            step = number // 8
            where = JOB if number % 1009 == 0 else Place(number % 8)
            value = float(step) if detector.what == "hang" else values[number % 997]
            yield Reading(where, metric, value, "", 0.04 * step, step, "same")

    for first in range(0, MILLION, 10_000):
        detector.look(list(some(first, 10_000)), 0.04 * first / 8)
    assert held_by(detector) < MOST_BYTES


def held_by(thing: object) -> int:
    """Bytes of all that it refers to, classes and modules left out."""
    seen: dict[int, object] = {}
    todo = [thing]
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            todo += gc.get_referents(one)
    return sum(map(sys.getsizeof, seen.values()))


@pytest.mark.long
@MAKES
def test_places_without_end_are_not_all_remembered(make: Callable[[], Detector]) -> None:
    detector = make()
    tracemalloc.start()
    for rank in range(60_000):
        detector.look(readings_of(detector.what, 50.0, 0.0001 * rank, rank, rank // 1000), 0.0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 * MOST_BYTES
