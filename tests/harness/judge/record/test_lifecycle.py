"""Logs that are right in an order that is seldom seen, and what is asked of none: no false alarm of
``lifecycle`` and ``recovery-shown``.
"""

from __future__ import annotations

import pytest

from tests.mutations.bases import judged
from tests.mutations.tape import MS, Change, Mutation, Tape
from trainchaos.chaos.events.log import Kind

ASKED = ("lifecycle", "recovery-shown")


def _found_late(tape: Tape) -> None:
    """That a peer of the killed rank has ended too is seen when those that take their places have
    been found.
    """
    found = max(row.time_ns for row in tape.find(Kind.PROCESS_SPAWNED))
    tape.find(Kind.PROCESS_EXITED, process="w0")[0].time_ns = found + 1
    late = [row for row in tape.find(Kind.FAILURE_DETECTED) if row.data["process"] == "w0"]
    for row in late:
        row.time_ns = found + 2


def _given_up(tape: Tape) -> None:
    """A save that was under way when its generation was aborted has no end."""
    like = tape.find(Kind.CHECKPOINT_SAVING)[0]
    parked = tape.find(Kind.PARKED, actor=like.actor)[0]
    tape.add(like, step=20, time_ns=parked.time_ns - MS, data={"checkpoint": "step-00000020"})


def _words_lost(tape: Tape) -> None:
    """The last lines of a rank went with its node."""
    gone = [row for row in tape.rows if row.actor == "w1"][3:]
    tape.drop(gone)


RIGHT: dict[str, tuple[str, Change]] = {
    "the end of a peer is found late, script": ("script", _found_late),
    "the end of a peer is found late, compare": ("compare", _found_late),
    "a save is given up with its generation": ("hot-spare", _given_up),
    "a rank's lines were lost with its node": ("agents", _words_lost),
}


@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name: str) -> None:
    base, change = RIGHT[name]
    findings = judged(base, Mutation(name, base, change, lifecycle="fail"))
    assert {checker: findings[checker].verdict for checker in ASKED} == dict.fromkeys(
        ASKED, "pass"
    ), findings
