"""When a fault may have been injected and a silence declared: what a log may say all the same, and
is not called wrong.

What must be seen is in ``tests/mutations/tables/clocks.py``.
"""

from __future__ import annotations

import pytest

from tests.mutations.bases import judged
from tests.mutations.tape import (
    FAIL,
    MS,
    Change,
    Mutation,
    Tape,
    all_of,
    each,
    edit,
    move,
    the_injection,
)
from trainchaos.chaos.events.log import Kind

EARLIER = move(Kind.FAULT_INJECTED, -60)
MEASURED = ("silent_s", "limit_s", "last_seq", "stopped")


def _answer(base: str, change: Change) -> tuple[str, str]:
    """What happens-before says of a base, changed."""
    finding = judged(base, Mutation("here", base, change, happens_before=FAIL))["happens-before"]
    return finding.verdict, finding.witness


def _failed(**data: object) -> Change:
    """The fault is said to have failed, too."""

    def do(tape: Tape) -> None:
        hit = the_injection(tape)
        row = tape.add(hit, time_ns=hit.time_ns + MS)
        row.kind = Kind.FAULT_FAILED
        row.data = {"fault": hit.data["fault"], "occurrence": hit.data["occurrence"], **data}

    return do


@pytest.mark.slow
def test_whoever_held_for_too_long_may_be_anywhere() -> None:
    assert _answer("straggler", EARLIER)[0] == FAIL
    let_go = _failed(reason="not fired: w2 held for it, and nobody answered", occurrence=7)
    assert _answer("straggler", all_of(EARLIER, let_go))[0] == "pass"


def test_an_occurrence_that_never_acted_is_tied_to_nothing() -> None:
    void = _failed(reason="the rank had left the point: armed again", again=True)
    assert _answer("straggler", all_of(EARLIER, void))[0] == "pass"


@pytest.mark.slow
def test_a_fault_that_came_late_came_after_the_steps_that_it_missed() -> None:
    assert (
        _answer("takeover", edit(Kind.FAULT_INJECTED, {"late_steps": 0}, fault="lost"))[0] == "pass"
    )
    verdict, witness = _answer(
        "takeover", edit(Kind.FAULT_INJECTED, {"late_steps": 1}, fault="lost")
    )
    assert (verdict, "lost was injected before any rank had done step 21" in witness) == (
        FAIL,
        True,
    ), witness


@pytest.mark.slow
def test_a_time_may_come_again_where_its_fault_may() -> None:
    """A fault that may fire at each attempt has its first time as its bound, always."""
    shared = all_of(
        edit(Kind.FAULT_INJECTED, {"act": 1}, fault="second"),
        each(
            Kind.FAULT_PLANNED, lambda data: data["at"].update(times_s=[1.2, 1.9]), fault="second"
        ),
        lambda tape: tape.add(tape.find(Kind.FAULT_INJECTED, fault="second")[0], data={"act": 0}),
    )
    assert _answer("unheld", shared)[0] == FAIL
    again = each(Kind.FAULT_PLANNED, lambda data: data["at"].update(fires=2), fault="second")
    assert _answer("unheld", all_of(shared, again))[0] == "pass"


@pytest.mark.slow
def test_an_older_log_does_not_say_how_long_a_rank_was_silent() -> None:
    def older(data: dict[str, object]) -> None:
        for name in MEASURED:
            data.pop(name, None)

    verdict, witness = _answer("hang", each(Kind.FAILURE_DETECTED, older))
    assert (verdict, "how long w2 was silent is not in the log" in witness) == ("pass", True), (
        witness
    )


@pytest.mark.slow
def test_an_older_log_does_not_say_which_act_a_hit_was_of() -> None:
    change = each(Kind.FAULT_INJECTED, lambda data: data.pop("act"))
    for base in ("two acts", "unheld"):
        found = judged(base, Mutation("here", base, change, identity=FAIL))
        assert (found["identity"].verdict, found["happens-before"].verdict) == ("pass", "pass")
