"""How many steps a job claims to have made: no fewer than it could know of."""

from __future__ import annotations

import pytest

from tests.support import arms
from tests.support.arms import FAIL, KILL, evidence_of
from tests.support.logs import Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers.job.data import step_arithmetic


@pytest.mark.parametrize(
    ("kind", "blamed", "claimed", "outcome", "expected"),
    [
        ("heartbeat-drop", "w2", 20, "halted", "pass"),
        ("heartbeat-drop", "w2", 26, "halted", "pass"),
        ("heartbeat-drop", "w2", 19, "halted", FAIL),  # nothing was hidden then
        ("heartbeat-drop", "w2", 27, "halted", FAIL),
        ("heartbeat-drop", "w2", 20, "completed", FAIL),
        ("heartbeat-drop", "w1", 20, "halted", FAIL),  # it was seen again
        ("heartbeat-drop", None, 20, "halted", FAIL),
        ("rank-hang", "w2", 20, "halted", FAIL),
    ],
)
def test_only_steps_that_a_fault_hid_to_the_end_may_be_missing(
    kind: str, blamed: str | None, claimed: int, outcome: str, expected: str
) -> None:
    script = Script("hot-spare", spares=1)
    arms.plan(script, "f", kind, rank=2)
    script.train(20)
    arms.inject(script, "f", kind, step=21, process="w2", rank=2)
    script.train(26)
    if blamed is not None:
        arms.fail(script, blamed, int(blamed[1:]), "hang")
    script.finish()
    script.find(Kind.RUN_FINISHED)[0].data.update(outcome=outcome, committed_step=claimed)
    fault = {**KILL, "id": "f", "kind": kind, "at": {"step": 21}}
    finding = step_arithmetic(evidence_of(script, [fault]))
    assert finding.verdict == expected, finding.witness
    if expected == FAIL:
        assert f"run_finished claims step {claimed}, the ranks committed 26" in finding.witness


@pytest.mark.parametrize(
    ("shown_again", "claimed", "expected"),
    [(False, 20, "pass"), (False, 19, FAIL), (True, 20, FAIL)],
)
def test_a_job_may_end_by_another_failure_before_a_hidden_rank_is_taken_for_hung(
    shown_again: bool, claimed: int, expected: str
) -> None:
    script = Script("none")
    arms.plan(script, "f", "heartbeat-drop", rank=2)
    script.train(20)
    arms.inject(script, "f", "heartbeat-drop", step=21, process="w2", rank=2)
    script.train(25)
    if shown_again:
        script.orchestrator(Kind.FAULT_HEALED, fault="f", occurrence=0, how="duration over")
    script.train(26)
    arms.fail(script, "w1", 1, "exit")
    script.finish()
    script.find(Kind.RUN_FINISHED)[0].data.update(outcome="gave-up", committed_step=claimed)
    fault = {**KILL, "id": "f", "kind": "heartbeat-drop", "at": {"step": 21}}
    assert step_arithmetic(evidence_of(script, [fault])).verdict == expected


def test_a_generation_that_came_after_would_have_told() -> None:
    script = Script("hot-spare", spares=1)
    arms.plan(script, "f", "heartbeat-drop", rank=2)
    script.train(20)
    arms.inject(script, "f", "heartbeat-drop", step=21, process="w2", rank=2)
    script.train(26)
    arms.fail(script, "w2", 2, "hang")
    arms.spare_joins(script)
    script.finish()
    script.find(Kind.RUN_FINISHED)[0].data.update(outcome="halted", committed_step=20)
    fault = {**KILL, "id": "f", "kind": "heartbeat-drop", "at": {"step": 21}}
    assert step_arithmetic(evidence_of(script, [fault])).verdict == FAIL


@pytest.mark.parametrize(
    ("hit", "expected"), [((2,), FAIL), ((1, 2), "pass"), ((0, 1, 2, 3), "pass")]
)
def test_half_of_the_ranks_hidden_look_like_a_job_that_waits_for_data(
    hit: tuple[int, ...], expected: str
) -> None:
    """Fewer would have been declared hung before the job was halted."""
    script = Script("hot-spare", spares=1)
    for rank in hit:
        arms.plan(script, f"f{rank}", "heartbeat-drop", rank=rank)
    script.train(20)
    for rank in hit:
        arms.inject(script, f"f{rank}", "heartbeat-drop", step=21, process=f"w{rank}", rank=rank)
    script.train(26)
    script.finish()
    script.find(Kind.RUN_FINISHED)[0].data.update(outcome="halted", committed_step=20)
    faults = [
        {**KILL, "id": f"f{rank}", "kind": "heartbeat-drop", "at": {"step": 21}} for rank in hit
    ]
    assert step_arithmetic(evidence_of(script, faults)).verdict == expected
