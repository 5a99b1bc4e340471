"""Every checker is green on clean logs, and red, it alone, on the log of an implementation with its
particular bug.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support import arms, logs
from tests.support.arms import (
    CLEAN,
    FAIL,
    KILL,
    OPEN,
    control,
    evidence_of,
    judged,
    red,
)
from tests.support.logs import MS, Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import (
    CHECKERS,
    EXPECTATION,
    Evidence,
    check,
    check_all,
    names_of,
)
from trainchaos.harness.judge.checkers.job.loss import compare
from trainchaos.harness.judge.record.whole import broken
from trainchaos.harness.judge.results import Finding


@pytest.mark.parametrize("name", CLEAN)
def test_clean_logs_are_green(name: str) -> None:
    make, faults = CLEAN[name]
    evidence = evidence_of(make(), faults)
    assert broken(evidence.log) == {}
    assert red(evidence) == {}


def test_a_machine_that_is_slow_for_the_whole_arm_proves_nothing_of_liveness() -> None:
    script, slower = arms.hot_spare(), 3
    for line in script.lines:
        line.time_ns *= slower
    finding = judged(evidence_of(script, [KILL]))["liveness"]
    assert finding.verdict == OPEN
    assert "at 0.33 of the rate of the control arm, for their world" in finding.witness
    assert (
        "at 1.00 of its own before the first fault: run it on a quieter machine" in finding.witness
    )


@pytest.mark.parametrize(("shorter", "verdict"), [(1, FAIL), (500, OPEN)])
def test_a_moment_of_slow_steps_is_not_enough_to_fail(shorter: int, verdict: str) -> None:
    script, paired = arms.hot_spare(), control("hot-spare", spares=1)
    ready = script.find(Kind.GENERATION_READY)[-1].time_ns
    for line in script.lines:
        line.time_ns = max(line.time_ns, 3 * line.time_ns - 2 * ready) // shorter
    for line in paired.lines:
        line.time_ns //= shorter
    finding = judged(evidence_of(script, [KILL], paired))["liveness"]
    assert finding.verdict == verdict and "0.50 is due" in finding.witness
    assert ("too short to tell: raise workload.steps" in finding.witness) == (verdict == OPEN)


@pytest.mark.parametrize(("shorter", "verdict"), [(1, FAIL), (50, OPEN)])
def test_a_moment_before_the_fault_is_not_enough_to_compare_with(
    shorter: int, verdict: str
) -> None:
    """Where there is no control arm."""
    script = arms.hot_spare()
    ready = script.find(Kind.GENERATION_READY)[-1].time_ns
    for line in script.lines:
        until, since = min(line.time_ns, ready), max(0, line.time_ns - ready)
        line.time_ns = until // shorter + 3 * since
    evidence = evidence_of(script, [KILL])
    assert judged(evidence)["liveness"].verdict == FAIL, "a control arm is enough to compare with"
    finding = judged(replace(evidence, control=None))["liveness"]
    assert finding.verdict == verdict and "this arm before its first fault" in finding.witness
    assert ("too short to tell: inject later" in finding.witness) == (verdict == OPEN)


# -- mutants that need a script of their own --


def test_survivors_going_back_behind_a_committed_step() -> None:
    assert red(evidence_of(arms.drop_replica(resume=24), [KILL])) == {"no-lost-commit": FAIL}


def test_going_ahead_over_a_step_nobody_committed() -> None:
    found = red(evidence_of(arms.drop_replica(resume=28), [KILL]))
    assert found == {"sample-accounting": FAIL, "step-arithmetic": FAIL}


def test_a_job_that_stops() -> None:
    script = arms.interrupted("hot-spare", spares=1)
    script.finish("gave-up", healed=["kill"])
    assert red(evidence_of(script, [KILL])) == {"liveness": FAIL}


def test_a_job_that_stops_as_expected() -> None:
    script = arms.interrupted("hot-spare", spares=1)
    script.finish("gave-up", healed=["kill"])
    evidence = evidence_of(script, [{**KILL, "expect": {"outcome": "fail-stop"}}])
    assert red(evidence) == {}
    assert check_all(evidence)[EXPECTATION].verdict == "pass"


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        ("recovered", "fail"),
        ("degraded", "pass"),
        (["recovered", "degraded"], "pass"),
        (["masked", "recovered"], "fail"),
    ],
)
def test_a_smaller_world_at_the_end_is_not_recovered(outcome: Any, verdict: str) -> None:
    script = arms.drop_replica(shrink=True, grow=False)
    evidence = evidence_of(script, [{**KILL, "expect": {"outcome": outcome}}])
    found = check_all(evidence)[EXPECTATION]
    assert found.verdict == verdict, found.witness


def test_failure_without_a_fault() -> None:
    script = arms.hot_spare()
    line = script.find(Kind.FAILURE_DETECTED)[0]
    extra = replace(line, time_ns=line.time_ns + MS, data={**line.data, "process": "w1", "rank": 1})
    script.lines.append(extra)
    # w1, whose end is declared, goes on
    assert red(evidence_of(script, [KILL])) == {"detection": FAIL, "recovery-shown": FAIL}


def test_detected_by_something_else_than_expected() -> None:
    evidence = evidence_of(arms.hot_spare(), [{**KILL, "expect": {"detected_by": "hang"}}])
    assert red(evidence) == {"detection": FAIL}


def test_fault_that_never_fires_says_what_to_do() -> None:
    script = Script("hot-spare")
    arms.plan(script, rank=2)
    script.train(logs.STEPS)
    evidence = evidence_of(script.finish(), [{**KILL, "at": {"step": 400}}])
    assert red(evidence) == {"fault-landed": OPEN}
    assert judged(evidence)["fault-landed"].witness == (
        "kill was due at step 400, the run ended at 40: lower at.step or raise workload.steps"
    )


def test_fault_in_the_control_arm() -> None:
    evidence = replace(evidence_of(arms.hot_spare(), [KILL]), arm="control", control=None)
    assert set(red(evidence)) == {"fault-landed", "detection", "identity"}


# -- the rest --


def test_checker_that_throws_is_inconclusive() -> None:
    def broken(evidence: Evidence) -> Finding:
        raise ZeroDivisionError("division by zero")

    finding = check(broken, evidence_of(arms.hot_spare(), [KILL]))
    assert finding.verdict == OPEN and "ZeroDivisionError" in finding.witness


def test_missing_control_is_inconclusive_unless_none_was_asked_for() -> None:
    evidence = evidence_of(arms.hot_spare(), [KILL])
    assert CHECKERS["loss-equality"](replace(evidence, control=None)).verdict == OPEN
    alone = evidence_of(arms.hot_spare(), [KILL], baseline="none")
    finding = CHECKERS["loss-equality"](replace(alone, control=None))
    assert finding.verdict == "pass" and finding.witness.startswith("nothing to check")


def test_band_from_two_control_seeds_is_named() -> None:
    evidence = evidence_of(arms.drop_replica(), [KILL])
    other = control("drop-replica", seed=18).log()
    exactness, witness = compare(replace(evidence, controls=(*evidence.controls, other)))
    assert exactness == "within the control band" and "control arms of 2 seeds" in witness


def test_shrunk_batch_passes_only_when_declared() -> None:
    script = arms.drop_replica(shrink=True, grow=False)
    declared = {"strategy": "drop-replica", "params": {"batch": "shrink"}}
    findings = judged(evidence_of(script, [KILL], recovery=declared))
    assert findings["sample-accounting"].verdict == "pass"
    assert "lost 56" in findings["sample-accounting"].witness
    assert findings["step-arithmetic"].verdict == "pass"
    undeclared = red(evidence_of(script, [KILL]))
    assert undeclared["sample-accounting"] == FAIL


def test_escaped_corruption_as_expected_and_not() -> None:
    flip = {**KILL, "id": "flip", "kind": "tensor-corrupt", "params": {"op": "bitflip"}}
    surprised = evidence_of(arms.bitflip(), [flip])
    assert red(surprised) == {"loss-equality": FAIL}
    expected = evidence_of(arms.bitflip(), [{**flip, "expect": {"outcome": "sdc-escape"}}])
    assert red(expected) == {}
    assert check_all(expected)[EXPECTATION].verdict == "pass"
    wrong = evidence_of(arms.bitflip(), [{**flip, "expect": {"outcome": "masked"}}])
    assert check_all(wrong)[EXPECTATION].verdict == FAIL


def test_names() -> None:
    assert names_of("default") == list(CHECKERS)
    assert names_of(["liveness"]) == ["fault-landed", "liveness"], "without it nothing is proved"
    assert names_of([]) == []
    with pytest.raises(KeyError, match="livness"):
        names_of(["livness"])
    assert all(checker.__doc__ for checker in CHECKERS.values())
