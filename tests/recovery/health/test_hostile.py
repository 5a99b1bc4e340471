"""What no source should say: every detector takes it, raises nothing, and stays small."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recovery.health.test_detectors import ALL, METRICS
from trainchaos.recovery.health.detector import Alarm, Detector
from trainchaos.recovery.health.readings import Place, Reading

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
