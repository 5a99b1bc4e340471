"""The last lines of ranks that were lost with their node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support import arms
from tests.support.arms import FAIL, KILL, OPEN, evidence_of, judged
from tests.support.clusters.nodelogs import Clock, on_nodes
from tests.support.logs import RANKS, Line, Script
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.harness.judge.checkers.faults.noticed import detection
from trainchaos.harness.judge.record.nodes import silenced


def node_lost(*, tail: int = 27, said: bool = True) -> Script:
    """w2 dies with node 1 when all have applied step 27; of its log nothing from step ``tail`` on
    is left.

    ``said``: the node is known to be lost.
    """
    script = arms.interrupted("hot-spare", spares=1, committers=("w0", "w1", "w2", "w3"))
    arms.park(script, ("w0", "w1", "w3"), dict.fromkeys(("w0", "w1", "w3"), 27))
    script.orchestrator(Kind.DECISION, actions=["form"], reason="s0 takes over from w2")
    arms.spare_joins(script, resume=27)
    script.train(script.steps)
    script.finish(healed=["kill"])
    on_nodes(script, Clock(ahead_ns=0), every_ms=100)
    script.edit(Kind.PROCESS_SPAWNED, {"node": 0}, actor=ORCHESTRATOR)
    for line in script.find(Kind.PROCESS_SPAWNED):
        line.data["node"] = 1 if line.data["process"] == "w2" else 0
    exited = next(line for line in script.find(Kind.PROCESS_EXITED) if line.data["process"] == "w2")
    if said:
        about = {"node": 1, "why": "its agent is gone"}
        script.lines.append(Line(ORCHESTRATOR, Kind.NODE_LOST, exited.time_ns - 1, 1, None, about))
    script.lines = [
        line for line in script.lines if line.actor != "w2" or line.step is None or line.step < tail
    ]
    return script


def test_who_was_lost_with_a_node() -> None:
    assert silenced(node_lost().log()) == {"w2"}
    assert silenced(node_lost(said=False).log()) == frozenset()
    late = node_lost()
    (lost,) = late.find(Kind.NODE_LOST)
    lost.time_ns = late.now
    assert silenced(late.log()) == frozenset(), "it had exited before"


def test_the_reduced_count_witnesses_what_a_lost_node_took_last() -> None:
    findings = judged(evidence_of(node_lost(), [KILL]))
    assert {n: f.witness for n, f in findings.items() if f.verdict != "pass"} == {}
    share = 16 // RANKS
    assert (
        f"; {share} of a lost node's last step are known by the reduced count"
        in findings["sample-accounting"].witness
    )


@pytest.mark.parametrize("checker", ["sample-accounting", "step-arithmetic"])
def test_without_a_lost_node_a_missing_share_is_a_failure(checker: str) -> None:
    assert judged(evidence_of(node_lost(said=False), [KILL]))[checker].verdict == "fail"


def test_a_count_that_does_not_fit_is_a_failure() -> None:
    script = node_lost()
    script.edit(Kind.STEP_COMMITTED, {"samples": 13}, step=27)
    findings = judged(evidence_of(script, [KILL]))
    assert {findings[name].verdict for name in ("step-arithmetic", "sample-accounting")} == {"fail"}


def test_shares_of_the_living_are_never_taken_on_trust() -> None:
    script = node_lost()
    script.drop(Kind.BATCH_TAKEN, actor="w1", step=27)
    assert judged(evidence_of(script, [KILL]))["sample-accounting"].verdict == "fail"


FAULTS = (Kind.FAULT_PLANNED, Kind.FAULT_INJECTED, Kind.FAULT_LANDED, Kind.FAULT_HEALED)


def taken_from_outside(**about: object) -> Script:
    """Node 1 was lost, and no fault had been injected."""
    script = node_lost()
    for line in [line for kind in FAULTS for line in script.find(kind)]:
        script.lines.remove(line)
    (lost,) = script.find(Kind.NODE_LOST)
    lost.data |= about
    return script


@pytest.mark.parametrize("arm", ["control", "faulted"])
def test_a_node_that_was_taken_away_is_no_false_alarm_and_no_pass(arm: str) -> None:
    found = detection(replace(evidence_of(taken_from_outside(taken_away=True), []), arm=arm))
    assert (found.verdict, found.witness) == (
        OPEN,
        "node 1 was lost, by no fault of the scenario: its agent is gone",
    )


@pytest.mark.parametrize("arm", ["control", "faulted"])
def test_a_node_that_was_only_given_up_may_have_been_alive(arm: str) -> None:
    found = detection(replace(evidence_of(taken_from_outside(), []), arm=arm))
    assert found.verdict == FAIL and "w2 (rank 2), cause exit" in found.witness


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"cause": "hang"}, "it was declared before, and for something else"),
        ({"process": "w1", "rank": 1}, "another than those of the node"),
    ],
)
def test_what_the_loss_of_a_node_does_not_explain_is_a_failure(
    change: dict[str, object], why: str
) -> None:
    script = taken_from_outside(taken_away=True)
    script.edit(Kind.FAILURE_DETECTED, change)
    for arm in ("control", "faulted"):
        assert detection(replace(evidence_of(script, []), arm=arm)).verdict == FAIL, why


def test_a_collective_that_breaks_with_the_node_is_explained_with_it() -> None:
    script = taken_from_outside(taken_away=True)
    (end,) = script.find(Kind.FAILURE_DETECTED)
    broke = {"failure": 2, "cause": "error", "process": None, "rank": None}
    script.lines.append(replace(end, data={**end.data, **broke}, time_ns=end.time_ns + 1))
    assert detection(evidence_of(script, [])).verdict == OPEN
    script.lines[-1].generation = 2
    assert detection(evidence_of(script, [])).verdict == FAIL, "of the next generation"


def test_a_node_that_a_fault_hit_is_not_taken_away_by_something_else() -> None:
    """The fault hit a process of it; what it did to it is the fault's."""
    script = node_lost()
    (lost,) = script.find(Kind.NODE_LOST)
    lost.data["taken_away"] = True
    assert detection(evidence_of(script, [KILL])).verdict == "pass"
    script.edit(Kind.FAILURE_DETECTED, {"process": "w1", "rank": 1})
    assert detection(evidence_of(script, [KILL])).verdict == FAIL
