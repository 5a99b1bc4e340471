"""A job that went on further than it had come: steps are missing that the control arm reports."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import pytest

from tests.harness.script.test_script_observer import COMMAND, Job
from tests.harness.script.test_script_sustained import inject
from tests.support import arms
from trainchaos.harness.judge.checkers import Evidence
from trainchaos.harness.judge.checkers.job.observed import progress
from trainchaos.harness.judge.results import Finding


def made(source: str, steps: Iterable[int], *, rank: int | None = None) -> Job:
    job = Job()
    job.observer._source = source
    job.found("w0", "w1")
    job.train(*steps, rank=rank)
    return job


def went_on(job: Job, steps: Iterable[int], *, lost: str = "w1", rank: int | None = None) -> None:
    """A rank is killed, and all are started again."""
    inject(job)
    job.exit(lost, signum=signal.SIGKILL)
    job.found("w2", "w3")
    job.train(*steps, rank=rank)


def seen(job: Job, control: Job | None) -> Finding:
    return progress(
        Evidence(
            arm="faulted",
            cell=arms.cell_of("none", [], workload=COMMAND),
            log=job.log(),
            control=control.log() if control else None,
        )
    )


def test_lines_may_be_lost_so_nobody_knows_whether_steps_were_left_out() -> None:
    job = made("output", range(1, 37))
    went_on(job, range(46, 101))
    found = seen(job, made("output", range(1, 101)))
    assert (found.verdict, found.witness) == (
        "inconclusive",
        "steps 37 to 45 were reported by nobody: the job went on with step 46 after the restart,"
        " and the control arm reports each: were they trained, or their lines lost?",
    )


@pytest.mark.parametrize(
    ("reporter", "lost", "verdict"),
    [(0, "w1", "fail"), (0, "w0", "inconclusive"), (None, "w1", "inconclusive")],
)
def test_reports_of_the_beacon_are_not_lost(reporter: int | None, lost: str, verdict: str) -> None:
    job = made("beacon", range(1, 37), rank=reporter)
    went_on(job, range(46, 101), lost=lost, rank=reporter)
    found = seen(job, made("beacon", range(1, 101), rank=reporter))
    assert found.verdict == verdict, "others than the one that was lost may have trained on"
    assert found.witness.startswith("steps 37 to 45 were ")


def test_nor_were_they_trained_if_each_rank_reports() -> None:
    job = made("beacon", ())
    for step in range(1, 37):
        job.train(step, rank=0)
        job.train(step, rank=1)
    went_on(job, range(46, 101), lost="w0", rank=0)
    found = seen(job, made("beacon", range(1, 101), rank=0))
    assert (found.verdict, found.witness) == (
        "fail",
        "steps 37 to 45 were left out: the job went on with step 46 after the restart, the beacon"
        " reported none of them, and the control arm reports each",
    )


def test_every_tenth_step_is_as_good() -> None:
    job = made("output", range(10, 40, 10))
    went_on(job, range(60, 101, 10))
    found = seen(job, made("output", range(10, 101, 10)))
    assert "steps 40 to 50 were reported by nobody" in found.witness
    assert "the control arm reports 2 of them" in found.witness


@pytest.mark.parametrize(
    ("before", "after", "control"),
    [
        (range(1, 37), range(31, 101), range(1, 101)),  # from a checkpoint
        (range(1, 37), range(38, 101), range(1, 101)),  # 37 was saved and not yet reported
        (range(10, 40, 10), range(50, 101, 10), range(10, 101, 10)),
        ([*range(1, 37)], [0, *range(31, 101)], range(1, 101)),  # a bar is drawn at once
        (range(1, 37), range(46, 101), [*range(1, 50), *range(60, 101)]),  # as irregular
    ],
)
def test_no_jump(before: Iterable[int], after: Iterable[int], control: Iterable[int]) -> None:
    job = made("output", before)
    went_on(job, after)
    assert seen(job, made("output", control)).verdict == "pass"


def test_what_was_done_after_another_restart_was_not_left_out() -> None:
    job = made("output", range(1, 37))
    went_on(job, range(46, 61))
    job.exit("w2", signum=signal.SIGKILL)
    job.found("w4", "w5")
    job.train(*range(31, 101))
    assert seen(job, made("output", range(1, 101))).verdict == "pass"


def test_without_a_control_arm_nobody_knows_which_steps_are_reported() -> None:
    job = made("output", range(1, 37))
    went_on(job, range(46, 101))
    assert seen(job, None).verdict == "pass"
