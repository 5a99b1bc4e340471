"""A network that became slower than a job's steps let expect: it is given longer, until a step gets
through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.recovery.detection.test_hangs import LIMITS, mark, trained, watch
from trainchaos.recovery.detection.hangs import HangDetector
from trainchaos.recovery.transport.progress_counters import Mark

ALL_WAIT = {name: mark("collective") for name in ("w0", "w1", "w2")}
ONE_BEHIND = {
    "w0": mark("collective", collective=3),
    "w1": mark("collective", step=9, collective=2),
}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("marks", "usual_s"), [(ALL_WAIT, 1.2), (ONE_BEHIND, 0.6)])
def test_a_network_that_got_slower_is_given_longer_each_time_until_a_step_gets_through(
    marks: Mapping[str, Mark], usual_s: float
) -> None:
    detector = trained()

    def given_s() -> float:
        detector.resumed(tuple(marks))
        hang = watch(detector, marks, for_s=100)
        assert hang is not None and hang.process == ""
        return hang.deadline_s

    assert [given_s() for _ in range(9)] == pytest.approx(
        [usual_s * 2 ** min(time, 6) for time in range(9)]
    )
    detector.resumed(tuple(marks))
    detector.observe(2000.0, 20)
    detector.observe(2020.0, 21)
    assert given_s() == pytest.approx(40.0), "that is how long a step takes now"
    detector.resumed(tuple(marks))
    for step in range(50):
        detector.observe(3000.0 + step * 0.05, step)
    detector.observe(3002.5, 50)
    assert given_s() == pytest.approx(usual_s), "it is fast again"


def test_what_the_user_says_of_hangs_stands_however_often_a_network_was_in_vain() -> None:
    detector = HangDetector(limits=replace(LIMITS, given_s=1.0))
    detector.observe(0.0, 0)
    detector.observe(0.05, 1)
    for _ in range(3):
        detector.resumed(())
        hang = watch(detector, ALL_WAIT, for_s=3)
        assert hang is not None and hang.deadline_s == 2.0


@pytest.mark.parametrize("phase", ["backward", "collective"])
def test_whoever_is_to_blame_is_found_as_fast_after_a_network_was_slow(phase: str) -> None:
    """In a collective too, where it has left out one of this very step."""
    detector = trained()
    for _ in range(3):
        assert watch(detector, ALL_WAIT, for_s=10) is not None
        detector.resumed(tuple(ALL_WAIT))
    marks = {**ALL_WAIT, "w1": mark(phase, collective=0)}
    found = watch(detector, marks, for_s=0.66)
    assert found is not None and found.process == "w1"
