"""A state that is wrong and the same on all ranks, in a run that loses a replica: found before that
step.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.mutations.tape import Tape
from tests.support.search.simulate import KILL, Played, cell_of, changed, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import CHECKERS, check
from trainchaos.harness.judge.results import Finding


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Played]:
    """A replica is lost in step 33 and left out, and the control arm."""
    root = tmp_path_factory.mktemp("arms")
    faulted, control = (
        play(cell_of("drop-replica", [KILL]), root, seed=3, arm=arm)
        for arm in ("faulted", "control")
    )
    return faulted, control


def judged(pair: tuple[Played, Played], change: Any) -> Finding:
    return check(CHECKERS["loss-equality"], changed(*pair, change))


@pytest.mark.slow
def test_what_nobody_touched_passes_by_band(pair: tuple[Played, Played]) -> None:
    found = judged(pair, lambda _: None)
    assert found.verdict == "pass" and "band" in found.witness


@pytest.mark.parametrize("name", ["parameters", "optimizer", "scheduler"])
def test_digests_that_are_equal_on_all_ranks_and_wrong_fail(
    pair: tuple[Played, Played], name: str
) -> None:
    def wrong(tape: Tape) -> None:
        for row in tape.find(Kind.STATE_DIGEST):
            if row.step == 20:
                row.data[name] = "f" * 16

    found = judged(pair, wrong)
    assert found.verdict == "fail"
    assert (
        f"{name} differ from the control arm's after step 20, before the world shrank at step 33"
        in found.witness
    )


def test_a_loss_that_is_another_by_one_bit_fails(pair: tuple[Played, Played]) -> None:
    def wrong(tape: Tape) -> None:
        for row in tape.find(Kind.STEP_COMMITTED):
            if row.step == 7:
                row.data["loss"] *= 1 + 2**-52

    assert judged(pair, wrong).verdict == "fail"


def test_from_the_first_step_with_fewer_ranks_on_the_band_judges(
    pair: tuple[Played, Played],
) -> None:
    def other(tape: Tape) -> None:
        for row in tape.find(Kind.STATE_DIGEST):
            if row.step and row.step > 33:
                row.data["parameters"] = "f" * 16

    assert judged(pair, other).verdict == "pass", "which is why determinism: elastic is there"
