"""A command that ends with fewer ranks than it began with, of which only some were found, or that
begins anew.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.harness.script.test_script_observer import COMMAND, Job
from tests.harness.script.test_script_sustained import heal, inject
from tests.support import arms
from trainchaos.chaos.scenario.model import InvariantExclusion
from trainchaos.harness.judge.checkers import Evidence, check_all
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.record.commands import strength_of
from trainchaos.harness.judge.results import Finding

ASKED = ["fault-landed", "detection", "full-strength"]


def job_of(ranks: int = 2, found: int | None = None) -> Job:
    job = Job(ranks=ranks)
    job.found(*(f"w{rank}" for rank in range(found or ranks)))
    return job


def train(job: Job, first: int, last: int, *ranks: int) -> None:
    """All these ranks report each step; none: one line a step that says not whose."""
    for step in range(first, last + 1):
        for rank in ranks or (None,):
            job.train(step, seconds=0.1 / max(1, len(ranks)), rank=rank)


def checked(
    job: Job, outcome: str = "completed", control: Job | None = None, **more: Any
) -> dict[str, Finding]:
    fault = {
        "id": "hit",
        "kind": "process-kill",
        "target": {"rank": 1},
        "at": {"step": 27},
    } | more.pop("fault", {})
    cell = arms.cell_of(
        "own", [fault], workload=COMMAND | {"ranks": job.ranks}, **{"invariants": ASKED, **more}
    )
    beside = control.log() if control is not None else None
    logs = (beside,) if beside is not None else ()
    made = Evidence(arm="faulted", cell=cell, log=job.log(outcome), control=beside, controls=logs)
    return check_all(made)


def incident_of(job: Job) -> Incident:
    return measure(job.log(), None).incidents[0]


@pytest.mark.parametrize("ranks", [(), (0, 1)])
def test_a_job_that_is_whole_again_has_recovered(ranks: tuple[int, ...]) -> None:
    job = job_of()
    train(job, 1, 30, *ranks)
    inject(job)
    job.lose("w1", signum=signal.SIGKILL)
    job.found("w2", "w3")
    train(job, 21, 100, *ranks)
    assert incident_of(job).outcome == "recovered"
    assert checked(job)["full-strength"].witness == "2 of 2 ranks at the end"


@pytest.mark.parametrize("ranks", [(), (0, 1)])
def test_a_job_that_goes_on_with_fewer_is_degraded_and_says_who_is_gone(
    ranks: tuple[int, ...],
) -> None:
    job = job_of()
    train(job, 1, 30, *ranks)
    inject(job)
    job.lose("w1", signum=signal.SIGKILL)
    train(job, 31, 100, *ranks[:1])
    incident = incident_of(job)
    assert incident.outcome == "degraded"
    who = "rank 1" if ranks else "w1"
    assert incident.evidence["ranks"] == f"1 of 2 ranks at the end: {who} gone"
    assert checked(job)["full-strength"].verdict == "fail"


def test_a_rank_that_is_dropped_and_lives_on_is_gone() -> None:
    job = job_of(4)
    train(job, 1, 30, 0, 1, 2, 3)
    inject(job, "process-stop", lasts=True)
    job.stopped.add("w1")
    job.wait(6)
    train(job, 31, 100, 0, 2, 3)
    heal(job)
    assert job.causes() == ["start", "resumed"]
    assert (
        incident_of(job).outcome == "degraded"
        and strength_of(measure(job.log(), None).history).ended == 3
    )


def test_one_that_is_held_stopped_to_the_end_did_not_take_part() -> None:
    job = job_of()
    train(job, 1, 30)
    inject(job, "process-stop", lasts=True)
    job.stopped.add("w1")
    job.wait(6)
    train(job, 31, 100)
    job.wait(1)
    heal(job)
    assert incident_of(job).outcome == "degraded"
    assert checked(job)["full-strength"].witness == "1 of 2 ranks at the end: w1 gone"


def test_a_rank_that_left_without_a_word_is_gone_too() -> None:
    job = job_of()
    train(job, 1, 30)
    inject(job)
    job.lose("w1", code=0)
    train(job, 31, 100)
    assert incident_of(job).outcome == "degraded"


@pytest.mark.parametrize("ranks", [(), (0, 1)])
def test_who_is_done_a_little_earlier_is_not_gone(ranks: tuple[int, ...]) -> None:
    job = job_of()
    train(job, 1, 30, *ranks)
    inject(job, "process-stop", lasts=True)
    heal(job)
    train(job, 31, 98, *ranks)
    job.lose("w1", code=0)
    train(job, 99, 100, *ranks[:1])
    assert incident_of(job).outcome == "masked"
    assert checked(job)["full-strength"].verdict == "pass"


def test_who_was_gone_before_the_fault_was_not_taken_by_it() -> None:
    job = job_of(4)
    train(job, 1, 10, 0, 1, 2, 3)
    train(job, 11, 30, 0, 1, 3)
    inject(job, "process-stop", lasts=True)
    heal(job)
    train(job, 31, 100, 0, 1, 3)
    assert incident_of(job).outcome == "masked" and checked(job)["full-strength"].verdict == "fail"


def half() -> Job:
    """Two of four ranks were found; the one that was hit is none of them."""
    job = job_of(4, found=2)
    train(job, 1, 30)
    inject(job)
    job.lose("w0", signum=signal.SIGKILL)
    job.found("w2", "w3")
    train(job, 21, 100)
    return job


def test_blame_and_counts_prove_nothing_where_half_the_ranks_were_found() -> None:
    said = checked(half(), fault={"expect": {"blame": "rank"}})
    assert {
        name: said[name].verdict
        for name in ("detection", "full-strength", "expectation", "progress")
    } == (dict.fromkeys(("detection", "full-strength", "expectation", "progress"), "inconclusive"))
    assert said["detection"].witness.startswith(
        "2 of 4 ranks were found, so that this proves nothing: "
    )
    assert incident_of(half()).outcome == "recovered", "as far as it was ever seen"


def again(first: int, *, done: int = 30, every: int = 1, hit: bool = True) -> Job:
    job = job_of()
    job.train(*range(every, done + 1, every))
    if hit:
        inject(job)
    job.restarted(*range(first, 101, every))
    return job


def test_a_job_that_begins_again_fails_unless_the_scenario_says_how_much_may_be_lost() -> None:
    found = checked(again(1))["kept-progress"]
    assert (
        found.verdict == "fail"
        and "began again from step 1, and 30 steps had been done" in found.witness
    )
    for limits in (["max <= 100"], ["max < 31", "median <= 30"], ["max <= 30", "min >= 0"]):
        said = checked(again(1), sla={"steps_lost": limits})["kept-progress"]
        assert said.verdict == "pass" and "sla.steps_lost allows" in said.witness, limits
    for limits in (["max <= 29"], ["max < 30"], ["max <= 100", "median <= 5"], ["min >= 0"]):
        said = checked(again(1), sla={"steps_lost": limits})["kept-progress"]
        assert said.verdict == "fail", limits
        assert "sla.steps_lost allows fewer" in said.witness or limits == ["min >= 0"]
    assert (
        checked(again(21), sla={"steps_lost": ["max <= 5"]})["kept-progress"].verdict == "pass"
    ), "the limit is judged as an SLA"
    assert "kept-progress" not in checked(
        again(1), invariants=InvariantExclusion(leave_out=["kept-progress"])
    )
    assert checked(again(1), invariants=[])["kept-progress"].verdict == "fail"


def test_one_that_begins_again_without_a_fault_too_proves_nothing() -> None:
    said = checked(again(1), control=again(1, hit=False))["kept-progress"]
    assert said.verdict == "inconclusive" and "the control arm began again too" in said.witness
    for control in (again(21, hit=False), again(1, done=2, hit=False)):
        assert checked(again(1), control=control)["kept-progress"].verdict == "fail"


def test_one_that_goes_on_from_a_checkpoint_does_not() -> None:
    assert (
        checked(again(2))["kept-progress"].verdict
        == checked(again(21))["kept-progress"].verdict
        == "pass"
    )
    assert checked(again(1, done=2))["kept-progress"].verdict == "pass", "it had hardly begun"
    assert "kept-progress" not in checked(again(31))


def test_where_reports_are_too_far_apart_nobody_can_tell() -> None:
    assert checked(again(10, done=90, every=10))["kept-progress"].verdict == "inconclusive"
    assert checked(again(20, done=90, every=10))["kept-progress"].verdict == "pass"
    assert checked(again(10, done=10, every=10))["kept-progress"].verdict == "pass"


def test_epochs_are_no_beginning_again() -> None:
    job = job_of()
    for _ in range(3):
        job.train(*range(1, 21), rank=0)
    inject(job, "process-stop", lasts=True)
    heal(job)
    job.train(*range(1, 21), rank=0)
    said = checked(job)
    assert said["progress"].verdict == "inconclusive" and "kept-progress" not in said
