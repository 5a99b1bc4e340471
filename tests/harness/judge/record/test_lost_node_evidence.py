"""The last lines of ranks that were lost with their node."""

from __future__ import annotations

import pytest

from tests.support import arms
from tests.support.arms import KILL, evidence_of, judged
from tests.support.clusters.nodelogs import Clock, on_nodes
from tests.support.logs import RANKS, Line, Script
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.harness.judge.record.lost_node_evidence import silenced


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
