"""The progress mark of a simulated rank: what is read is what was noted last, whatever it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainchaos.harness.sim.world.clock import Clock
from trainchaos.harness.sim.world.process import SimMark
from trainchaos.recovery.transport import progress_counters

NOTES: dict[str, Callable[[SimMark], None]] = {
    "a phase": lambda mark: mark.enter(progress_counters.BETWEEN),
    "a step": lambda mark: mark.begin(2, 7),
    "a collective": lambda mark: mark.collective(3),
    "that it works": lambda mark: mark.touch(),
    "that it is busy": lambda mark: mark.busy(5),
    "a commit": lambda mark: mark.commit(7),
    "an event": lambda mark: mark.wrote(9),
}


@pytest.mark.parametrize("what", NOTES)
def test_a_mark_that_was_read_shows_what_is_noted_after(what: str) -> None:
    clock = Clock()
    mark = SimMark(clock)
    before = mark.read()
    clock.read()
    NOTES[what](mark)
    after = mark.read()
    assert after != before and mark.read() == after


def test_a_hidden_mark_shows_nothing_new_until_it_is_shown_again() -> None:
    mark = SimMark(Clock())
    before = mark.read()
    mark.hide(True)
    mark.commit(7)
    assert mark.read() == before
    mark.hide(False)
    assert mark.read().committed == 7
