"""Whom a failure may blame where a fault hit several at once: no other answer is excused than one
that must be.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support import arms
from tests.support.arms import FAIL, KILL, evidence_of
from tests.support.logs import Script
from tests.support.search.simulate import cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers.faults.noticed import detection
from trainchaos.harness.judge.record.episodes import episodes_of
from trainchaos.harness.judge.record.lineage import history_of

CHANGED = {"before": "aa", "after": "bb"}
SIX = tuple(f"w{rank}" for rank in range(6))


def verdict(hit: Iterable[int], cause: str, blamed: int | None, *, kind: str, shards: int) -> str:
    """Of ``detection``, where a fault hits these of six ranks in one step and this one is
    blamed.
    """
    script = Script("hot-spare")
    arms.plan(script, "f", kind, ranks=list(hit))
    script.form(SIX, state="initial", cause="start", resume=0)
    started = script.find(Kind.GENERATION_STARTED)[-1]
    started.data["shards"] = shards
    for number, rank in enumerate(hit):
        about = {"fault": "f", "kind": kind, "occurrence": number}
        script.orchestrator(
            Kind.FAULT_INJECTED, step=27, **about, target={"process": f"w{rank}", "rank": rank}
        )
        script.orchestrator(
            Kind.FAULT_LANDED, step=27, **about, witness="rank: digests", evidence=CHANGED
        )
    script.orchestrator(
        Kind.FAILURE_DETECTED,
        step=27,
        failure=1,
        cause=cause,
        process=None if blamed is None else f"w{blamed}",
        rank=blamed,
        detail="seen",
    )
    return detection(
        evidence_of(script, [{**KILL, "id": "f", "kind": kind, "target": {"select": "all"}}])
    ).verdict


@pytest.mark.parametrize(
    ("hit", "cause", "expected"),
    [
        ([4, 5], "error", "pass"),  # one replica of two ranks, whole: nobody is behind its replica
        ([0, 1, 4, 5], "error", "pass"),
        ([5], "error", FAIL),
        ([3, 4], "error", FAIL),  # two ranks of two replicas
        ([2, 3, 5], "error", "pass"),  # half of all: neither side is the odd one
        ([1, 2, 3, 5], "error", FAIL),
        ([4, 5], "hang", FAIL),
        ([4, 5], "nonfinite", FAIL),
    ],
)
def test_nobody_need_be_named_where_a_collective_fails_for_whole_replicas(
    hit: list[int], cause: str, expected: str
) -> None:
    assert verdict(hit, cause, None, kind="collective-skip", shards=2) == expected


def test_a_replica_of_one_rank_is_not_excused_as_a_whole_one() -> None:
    assert verdict([4, 5], "error", None, kind="collective-skip", shards=1) == FAIL


@pytest.mark.parametrize(
    ("hit", "cause", "blamed", "expected"),
    [
        ([0, 1, 2, 3], "diverged", 5, "pass"),
        ([0, 1, 2], "diverged", 5, FAIL),  # as many as not: there is no majority
        ([0], "diverged", 5, FAIL),
        ([0, 1, 2, 3], "hang", 5, FAIL),
        ([0, 1, 2, 3], "nonfinite", 5, FAIL),
    ],
)
def test_who_still_holds_the_right_state_is_the_odd_one_only_among_replicas_that_are_compared(
    hit: list[int], cause: str, blamed: int, expected: str
) -> None:
    assert verdict(hit, cause, blamed, kind="replica-desync", shards=1) == expected


def struck_again(script: Script, fault: str, occurrence: int, processes: list[str]) -> None:
    about = {"fault": fault, "kind": "node-stop", "occurrence": occurrence}
    script.orchestrator(Kind.FAULT_INJECTED, **about, target={"nodes": [0], "processes": processes})


def test_a_process_that_is_hit_again_does_not_end_what_hit_the_others_with_it() -> None:
    script = Script("hot-spare")
    arms.plan(script, "all", "node-stop", nodes=[0])
    arms.plan(script, "one", "gpu-lost", rank=2)
    struck_again(script, "all", 0, ["w0", "w1", "w2", "w3"])
    arms.fail(script, "w1", 1, "hang")
    struck_again(script, "one", 0, ["w2"])
    arms.fail(script, "w2", 2)
    arms.fail(script, "w3", 3, "hang")
    struck_again(script, "all", 1, ["w0", "w1"])
    arms.fail(script, "w0", 0, "hang")
    first, one, again = episodes_of(history_of(script.log()))
    assert [f.data["process"] for f in (first.failure, *first.others) if f] == ["w1", "w3"]
    assert [f.data["process"] for f in (one.failure, *one.others) if f] == ["w2"]
    assert [f.data["process"] for f in (again.failure, *again.others) if f] == ["w0"]


@pytest.mark.slow
@pytest.mark.parametrize(("due", "found"), [("exit", "pass"), ("hang", FAIL)])
def test_of_two_that_are_hit_at_once_one_may_show_what_is_expected(
    due: str, found: str, memory: Path
) -> None:
    """The restart that answers the first ends the other."""
    kill = KILL | {"target": {"select": {"count": 2}}, "expect": {"detected_by": due}}
    kill["at"] = {"step": 33, "phase": "backward"}
    cell = cell_of("checkpoint-restart", [kill])
    faulted, control = (play(cell, memory, seed=3, arm=arm) for arm in ("faulted", "control"))
    assert len(evidence(faulted, control).measures.episodes) == 2
    assert detection(evidence(faulted, control)).verdict == found
