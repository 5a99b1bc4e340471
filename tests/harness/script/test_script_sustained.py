"""A command has recovered with new steps that go on, not with the first late line about one."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from typing import Any

import pytest

from tests.harness.script.test_script_observer import Job, S, begun
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.record.commands import RATED
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.observed import observed_history


@pytest.fixture
def job() -> Job:
    return begun(*range(1, 31))


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        (range(1, 36), range(31, 101), "5"),  # each step
        (range(10, 40, 10), range(30, 101, 10), "≤ 19"),  # 39 may be done, and 20 restored
        ([3, 7, 10, 14, 17, 21, 24, 28, 31, 35], range(34, 101, 4), "≤ 8"),  # a bar that skips
        ([3, 7, 10, 14, 17, 21, 24, 28, 31, 35], range(48, 101, 4), "not known, at most 35"),
    ],
)
def test_steps_lost_are_known_as_far_as_steps_are_seen(
    before: Iterable[int], after: Iterable[int], lost: str
) -> None:
    job = begun(*before)
    inject(job)
    job.restarted(*after)
    measures = measure(job.log(), None)
    (incident,) = measures.incidents
    assert incident.lost == lost
    assert (measures.values["steps_lost"] == []) == lost.startswith("not known")


def inject(
    job: Job,
    kind: str = "process-kill",
    *,
    lasts: bool = False,
    fault: str = "hit",
    step: int | None = None,
) -> None:
    """At rank 1; it landed."""
    target = {"process": job.observer.members[1], "rank": 1}
    about: dict[str, Any] = {"step": step, "fault": fault, "occurrence": 0}
    job.record(Kind.FAULT_PLANNED, fault=fault, kind=kind, target={"rank": 1}, at={}, lasts=lasts)
    job.record(Kind.FAULT_INJECTED, **about, kind=kind, target=target)
    seen = {"os_state": "T"} if kind.endswith("-stop") else {}
    job.record(Kind.FAULT_LANDED, **about, witness="kernel", evidence=seen)


def heal(job: Job) -> None:
    job.record(Kind.FAULT_HEALED, fault="hit", occurrence=0, how="done")


def incident_of(job: Job, outcome: str = "completed") -> Incident:
    return measure(job.log(outcome), None).incidents[0]


def since_injection(job: Job) -> float:
    start = next(e.time_ns for e in job.events if e.kind is Kind.FAULT_INJECTED)
    return (job.now - start) / S


def stop(job: Job, *, redrawn: tuple[int, ...] = (31,)) -> None:
    """A rank stands still; 10.9 s later a bar is drawn again, for a step that had been done."""
    inject(job, "process-stop", lasts=True)
    job.stopped.add("w1")
    job.wait(10.8)
    job.train(*redrawn)
    job.wait(49.6)


def test_a_bar_drawn_again_during_a_stall_is_no_recovery(job: Job) -> None:
    stop(job)
    job.stopped.clear()
    heal(job)
    job.train(32)
    due = since_injection(job)
    job.train(*range(33, 101))
    incident = incident_of(job)
    assert job.causes()[:2] == ["start", "resumed"] and due > 60
    assert (incident.outcome, incident.first_new_step) == ("recovered", 32)
    assert incident.recovery_time == pytest.approx(due)
    assert sum(span.seconds for span in incident.phases) == pytest.approx(due)


def test_several_lines_at_once_are_none_while_the_fault_still_acts(job: Job) -> None:
    stop(job, redrawn=(31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43))
    job.stopped.clear()
    heal(job)
    job.train(*range(44, 101))
    incident = incident_of(job)
    assert incident.recovery_time is not None and incident.recovery_time > 60
    assert incident.first_new_step == 44


def test_lines_that_come_out_when_a_process_ends_are_none(job: Job) -> None:
    inject(job)
    job.exit("w1", signum=signal.SIGKILL)
    job.train(*range(31, 45), seconds=0.001)  # buffered, and out at last
    job.wait(3)
    job.found("w2", "w3")
    job.train(*range(21, 45))
    job.train(45)
    due = since_injection(job)
    job.train(*range(46, 101))
    incident = incident_of(job)
    assert job.causes() == ["start", "shrunk", "restart"]
    assert (incident.first_new_step, incident.steps_lost) == (45, 24)
    assert incident.recovery_time == pytest.approx(due) and due > 4


def restarted(job: Job) -> None:
    inject(job)
    job.restarted(*range(21, 31))


def test_a_job_that_crawls_has_not_recovered(job: Job) -> None:
    restarted(job)
    job.train(*range(31, 101), seconds=0.6)
    assert incident_of(job).recovery_time is None


def test_it_has_when_its_steps_are_quick_again(job: Job) -> None:
    restarted(job)
    job.train(*range(31, 61), seconds=0.6)
    due = since_injection(job)
    job.train(*range(61, 101))
    recovery = incident_of(job).recovery_time
    assert recovery is not None and due - RATED * 0.6 <= recovery <= due


@pytest.mark.parametrize("seconds", [[0.4], [0.9] * (RATED - 1) + [0.4]])
def test_slower_steps_than_before_are_no_crawl(job: Job, seconds: list[float]) -> None:
    restarted(job)
    job.train(31)
    due = since_injection(job)
    for step in range(32, 101):
        job.train(step, seconds=seconds[step % len(seconds)])
    assert incident_of(job).recovery_time == pytest.approx(due)


@pytest.mark.parametrize("left", [3, RATED])
def test_few_steps_tell_no_rate(job: Job, left: int) -> None:
    job.train(*range(31, 101 - left))
    restarted(job)
    job.train(*range(31, 101 - left))
    job.train(*range(101 - left, 101), seconds=0.9)
    assert incident_of(job).first_new_step == 101 - left


@pytest.mark.parametrize(("ended", "outcome"), [("gave-up", "fail-stop"), ("timed-out", "hang")])
def test_a_last_word_before_the_end_is_no_recovery(job: Job, ended: str, outcome: str) -> None:
    stop(job)
    incident = incident_of(job, ended)
    assert (incident.outcome, incident.recovery_time) == (outcome, math.inf)


def test_the_first_new_step_counts_when_others_follow(job: Job) -> None:
    inject(job)
    job.exit("w1", signum=signal.SIGKILL)
    job.train(*range(31, 33))
    due = since_injection(job)
    job.train(*range(33, 101))
    incident = incident_of(job)
    assert (incident.first_new_step, incident.outcome) == (32, "degraded")
    assert incident.recovery_time == pytest.approx(due)


def test_others_that_join_while_the_job_goes_on_take_nothing_back(job: Job) -> None:
    inject(job)
    job.exit("w1", signum=signal.SIGKILL)
    job.train(31, 32, 33)
    job.observer.on_ranks({0: "w0", 1: "w2"}, job.now)
    job.train(*range(34, 101))
    incident = incident_of(job)
    assert (incident.first_new_step, incident.outcome) == (32, "recovered")


def test_slow_steps_are_waited_for() -> None:
    job = begun(*range(1, 31), seconds=4.0)
    inject(job)
    job.restarted(*range(21, 36), seconds=4.0)
    job.wait(60)
    assert incident_of(job).first_new_step == 31


@pytest.mark.parametrize("left", [1, 2])
def test_what_cannot_follow_is_not_asked_for(job: Job, left: int) -> None:
    job.train(*range(31, 101 - left))
    inject(job)
    job.restarted(*range(90, 101))
    assert incident_of(job).first_new_step == 101 - left


def test_the_next_fault_may_come_at_once(job: Job) -> None:
    for names, fault in ((("w2", "w3"), "hit"), (("w4", "w5"), "second")):
        inject(job, fault=fault)
        job.exit(job.observer.members[1], signum=signal.SIGKILL)
        job.found(*names)
        job.train(*range(21, 32 if fault == "hit" else 101))
    first, second = measure(job.log(), None).incidents
    assert (first.outcome, first.first_new_step) == ("recovered", 31)
    assert (second.outcome, second.first_new_step) == ("recovered", 32)


def test_who_was_cut_short_is_not_asked_for_more(job: Job) -> None:
    inject(job)
    job.restarted(*range(21, 32))
    assert incident_of(job, "interrupted").outcome == "recovered"


@pytest.mark.parametrize("resumed", [20, 0])
def test_a_bar_at_nothing_is_not_where_it_goes_on(resumed: int) -> None:
    job = begun()
    job.train(*range(0, 31))  # a bar of 100: 0/100 before the first step
    inject(job)
    job.restarted(0, *range(resumed + 1, 100))
    incident = incident_of(job)
    assert incident.restored_step == (resumed + 1 if resumed else 0)
    history = history_of(job.log())
    assert observed_history(history.log, history.info).committed_step == 100
