"""A state that is wrong and the same on all ranks, in a run that loses a replica: found before that
step. What each rank has of its own, buffers and registered objects, is compared with that of the
same rank of the control arm, and never with another rank's.
"""

from __future__ import annotations

from collections.abc import Callable
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


# ---- what each rank has of its own

Pair = Callable[[str], tuple[Played, Played]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """By strategy, an arm in which rank 2 is killed in step 33, and the control arm."""
    known: dict[str, tuple[Played, Played]] = {}

    def pair(strategy: str) -> tuple[Played, Played]:
        if strategy not in known:
            root, cell = tmp_path_factory.mktemp("arms"), cell_of(strategy, [KILL])
            faulted, control = (play(cell, root, seed=3, arm=arm) for arm in ("faulted", "control"))
            known[strategy] = faulted, control
        return known[strategy]

    return pair


def judged_of(pair: tuple[Played, Played], name: str = "loss-equality", **digests: Any) -> Finding:
    """With other digests of ``rank`` after ``step``."""
    rank, step = digests.pop("rank", 0), digests.pop("step", 60)

    def wrong(tape: Tape) -> None:
        for row in tape.find(Kind.STATE_DIGEST, step=step):
            if row.data["rank"] == rank:
                row.data |= digests.get("digests", {})

    return check(CHECKERS[name], changed(*pair, wrong))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hot-spare", "checkpoint-restart", "drop-replica"])
def test_ranks_may_differ(pairs: Pair, strategy: str) -> None:
    for name in ("loss-equality", "replica-equality"):
        assert judged_of(pairs(strategy), name).verdict == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["buffers", "registered.seen"])
@pytest.mark.parametrize(
    ("strategy", "rank", "step", "verdict"),
    [
        ("hot-spare", 1, 60, "fail"),
        ("hot-spare", 2, 20, "fail"),  # before it was lost
        ("checkpoint-restart", 2, 60, "fail"),
        ("drop-replica", 1, 20, "fail"),
        ("drop-replica", 1, 40, "pass"),  # another share of the samples, since the world shrank
    ],
)
def test_what_is_not_the_control_arms_fails(
    pairs: Pair, strategy: str, rank: int, step: int, verdict: str, part: str
) -> None:
    found = judged_of(pairs(strategy), rank=rank, step=step, digests={part: "f" * 16})
    assert found.verdict == verdict
    if verdict == "fail":
        where = f"{part} of rank {rank} differ from the control arm's after step {step}"
        assert where in found.witness


@pytest.mark.slow
def test_who_took_a_lost_ranks_place_has_what_it_copied(pairs: Pair) -> None:
    """Its buffers are another rank's, and of what is alike on all ranks it has the same."""
    pair = pairs("hot-spare")
    assert judged_of(pair, rank=2, digests={"buffers": "f" * 16}).verdict == "pass"
    found = judged_of(pair, rank=2, digests={"registered.seen": "f" * 16})
    assert found.verdict == "fail"
