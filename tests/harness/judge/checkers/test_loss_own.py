"""Buffers and registered objects are each rank's own: they are compared with those of the same rank
of the control arm, and never with another rank's.
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


def judged(pair: tuple[Played, Played], name: str = "loss-equality", **digests: Any) -> Finding:
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
        assert judged(pairs(strategy), name).verdict == "pass"


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
    found = judged(pairs(strategy), rank=rank, step=step, digests={part: "f" * 16})
    assert found.verdict == verdict
    if verdict == "fail":
        where = f"{part} of rank {rank} differ from the control arm's after step {step}"
        assert where in found.witness


@pytest.mark.slow
def test_who_took_a_lost_ranks_place_has_what_it_copied(pairs: Pair) -> None:
    """Its buffers are another rank's, and of what is alike on all ranks it has the same."""
    pair = pairs("hot-spare")
    assert judged(pair, rank=2, digests={"buffers": "f" * 16}).verdict == "pass"
    found = judged(pair, rank=2, digests={"registered.seen": "f" * 16})
    assert found.verdict == "fail"
