"""A state that a fault made non-finite is answered when it is refused: its digests until then fail
nothing, and all others are compared as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.mutations.tape import Tape
from tests.support.search.simulate import Played, cell_of, changed, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import CHECKERS, check

NAN: dict[str, Any] = {
    "id": "nan",
    "kind": "tensor-corrupt",
    "params": {"surface": "optimizer_state", "op": "nan"},
    "target": {"rank": 2},
    "at": {"step": 20},
}
ABOUT = ("replica-equality", "loss-equality")
HIT = "w2"
Arms = tuple[Played, Played]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> Arms:
    """A NaN in a state after a step with digests, which nothing is due to compare."""
    root = tmp_path_factory.mktemp("arms")
    cell = cell_of("hot-spare", [NAN], verify_every=50)
    return play(cell, root, seed=3), play(cell, root, seed=3, arm="control")


def judged(arms: Arms, change: Callable[[Tape], None] = lambda _: None) -> list[str]:
    """What the checkers say of the faulted arm after a change of its log."""
    made = changed(*arms, change)
    return [check(CHECKERS[name], made).verdict for name in ABOUT]


def other_digest(tape: Tape, *, actor: str, step: int) -> None:
    for row in tape.find(Kind.STATE_DIGEST, actor=actor, step=step):
        row.data["parameters"] = "0" * 16


@pytest.mark.slow
def test_a_refused_state_fails_nothing(arms: Arms) -> None:
    log = arms[0].log
    digests = {
        e.data["parameters"] for e in log.of(Kind.STATE_DIGEST) if e.step == NAN["at"]["step"]
    }
    causes = [(e.data["cause"], e.data["process"]) for e in log.of(Kind.FAILURE_DETECTED)]
    assert len(digests) == 2 and causes == [("nonfinite", HIT)]
    assert judged(arms) == ["pass", "pass"]


@pytest.mark.parametrize(
    ("actor", "step"),
    [("w1", 20), (HIT, 10), (HIT, 30)],
    ids=["of another rank", "before the fault", "after it was refused"],
)
def test_other_digests_are_compared(arms: Arms, actor: str, step: int) -> None:
    def change(tape: Tape) -> None:
        other_digest(tape, actor=actor, step=step)

    assert judged(arms, change) == ["fail", "fail"]


def test_a_rank_that_was_not_named_holds_a_state_that_differs(arms: Arms) -> None:
    def another(tape: Tape) -> None:
        for row in tape.find(Kind.FAILURE_DETECTED, cause="nonfinite"):
            row.data |= {"process": "w1", "rank": 1}

    assert judged(arms, another) == ["fail", "fail"]


def test_other_values_are_no_reason_to_be_refused(arms: Arms) -> None:
    def finite(tape: Tape) -> None:
        for row in tape.find(Kind.FAULT_LANDED):
            row.data["evidence"]["new"] = ["1.5"]

    assert judged(arms, finite) == ["fail", "fail"]


def test_what_is_refused_after_the_last_step_leaves_no_digest_of_it(memory: Path) -> None:
    last = {**NAN, "at": {"step": 60}}
    cell = cell_of("hot-spare", [last], verify_every=0)
    faulted = play(cell, memory, seed=3)
    found = check(CHECKERS["replica-equality"], evidence(faulted, None))
    assert (faulted.outcome, found.verdict) == ("completed", "pass"), found
