"""The end of a command: a kill after its last step, a command started again, and who was asked to
end.
"""

from __future__ import annotations

import math
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.script.test_script_observer import COMMAND, Job, begun
from tests.harness.script.test_script_sustained import incident_of, inject, since_injection
from tests.support import arms
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import Evidence
from trainchaos.harness.judge.checkers.faults.noticed import detection
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.script.processes.command import CommandEnded
from trainchaos.harness.script.processes.ranks import ExitedRank
from trainchaos.harness.script.rank_watch import RankWatch


@pytest.fixture
def done() -> Job:
    """The last step was reported, and its checkpoint is being written."""
    job = begun(*range(1, 101))
    inject(job)
    return job


def killed(job: Job, name: str = "w1", code: int | None = None) -> None:
    job.lose(name, code, signal.SIGKILL if code is None else None)


def restarted(job: Job) -> None:
    job.observer.on_command_failed("exit code 1", job.now)
    job.record(Kind.COMMAND_ENDED, attempt=1, exit_code=1, signal=None, asked=False)
    job.now += 10**9
    job.record(Kind.COMMAND_STARTED, attempt=2, pid=2, argv=["train"])


def test_a_kill_after_the_last_step_is_a_failure_once_the_command_fails(done: Job) -> None:
    killed(done, "w0", code=1)
    killed(done)
    assert done.failures() == [], "the launcher may not have needed it any more"
    restarted(done)
    assert done.failures() == [("exit", "w1")]


def test_a_kill_in_the_last_save_is_recovered_from_by_doing_the_steps_again(done: Job) -> None:
    killed(done)
    restarted(done)
    done.found("w2", "w3")
    done.train(*range(91, 101))
    due = since_injection(done)
    done.wait(5)
    incident = incident_of(done)
    assert (incident.outcome, incident.detected_by, incident.steps_lost) == (
        "recovered",
        "exit",
        10,
    )
    assert incident.recovery_time == pytest.approx(due)
    assert measure(done.log(), None).values["steps_lost"] == [10]


def test_or_with_the_good_end_where_nothing_is_left_to_do(done: Job) -> None:
    killed(done)
    restarted(done)
    done.now += 3 * 10**9
    done.record(Kind.COMMAND_ENDED, attempt=2, exit_code=0, signal=None, asked=False)
    due = since_injection(done)
    incident = incident_of(done)
    assert (incident.outcome, incident.steps_lost) == ("recovered", 0)
    assert incident.recovery_time == pytest.approx(due)


def test_without_a_restart_the_job_was_over(done: Job) -> None:
    killed(done)
    done.observer.on_command_failed("exit code 1", done.now)
    incident = incident_of(done, "gave-up")
    assert incident.outcome == "fail-stop"


def test_who_is_ended_after_the_last_step_of_a_command_that_ends_well_has_not_failed(
    done: Job,
) -> None:
    killed(done)
    killed(done, "w0", code=1)
    assert done.failures() == [] and incident_of(done).outcome == "masked"


@pytest.fixture
def alone() -> Job:
    """A script waits for both of its processes: one is killed, the other does all its steps."""
    job = begun(*range(1, 11))
    inject(job)
    killed(job)
    job.train(*range(11, 101))
    return job


def test_a_command_that_lost_a_process_for_good_fails_because_of_that(alone: Job) -> None:
    alone.lose("w0", code=0)
    restarted(alone)
    alone.found("w2", "w3")
    alone.train(*range(1, 101))
    due = since_injection(alone)
    incident = incident_of(alone)
    assert alone.failures() == [("exit", "w1"), ("exit", None)]
    (episode,) = measure(alone.log(), None).episodes
    assert [failure.data["process"] for failure in episode.others] == [None]
    assert (incident.outcome, incident.steps_lost) == ("recovered", 100)
    assert incident.recovery_time == pytest.approx(due), "its survivor's steps were no recovery"
    assert incident.time_to_full_rate is None, "no step was left to show it"


def test_nor_were_they_if_it_is_not_started_again(alone: Job) -> None:
    alone.lose("w0", code=0)
    incident = incident_of(alone, "gave-up")
    assert (incident.outcome, incident.recovery_time) == ("fail-stop", math.inf)
    assert incident.first_new_step is None


def test_a_command_whose_processes_were_all_there_again_fails_of_itself(alone: Job) -> None:
    restarted(alone)
    alone.found("w2", "w3")
    alone.train(*range(1, 51))
    alone.lose("w2", code=0)
    alone.lose("w3", code=0)
    alone.observer.on_command_failed("exit code 2", alone.now)
    found = measure(alone.log("gave-up"), None)
    assert len(found.episodes[0].others) == 1, "only the first end follows from the kill"


def test_no_job_is_at_full_rate_before_it_recovered() -> None:
    job = begun(*range(5, 51, 5), seconds=0.5)
    inject(job)
    job.restarted(*range(45, 101, 5), seconds=0.5)
    incident = incident_of(job)
    assert incident.recovery_time is not None and incident.time_to_full_rate is not None
    assert incident.time_to_full_rate >= incident.recovery_time


# ---- survivors that are ended some seconds later


def blamed(job: Job) -> Finding:
    """What the detection checker says of a fault that hit rank 1."""
    fault = {"id": "hit", "kind": "process-kill", "target": {"rank": 1}, "at": {"step": 30}}
    return detection(
        Evidence(
            arm="faulted",
            cell=arms.cell_of("none", [fault], workload=COMMAND),
            log=job.log(),
        )
    )


@pytest.fixture
def torn() -> Job:
    """One of two ranks was lost in step 30, the other goes on and is ended by its launcher."""
    job = begun(*range(1, 31))
    inject(job)
    return job


def started_again(job: Job) -> float:
    """All ranks go on from a checkpoint of step 20; returns when the first new step is done."""
    job.now += 10**9
    job.found("w2", "w3")
    job.train(*range(21, 57))
    due = since_injection(job)
    job.train(*range(57, 101))
    return due


def test_survivors_that_a_launcher_ends_later_fail_because_of_the_one_that_was_lost(
    torn: Job,
) -> None:
    killed(torn)
    torn.train(*range(31, 56))
    killed(torn, "w0")
    due = started_again(torn)
    incident = incident_of(torn)
    assert torn.causes() == ["start", "shrunk", "restart"]
    assert (incident.outcome, incident.steps_lost, incident.first_new_step) == ("recovered", 35, 56)
    assert incident.recovery_time == pytest.approx(due), "nor were their steps a recovery"
    assert blamed(torn).verdict == "pass"


@pytest.mark.parametrize("silent", [False, True])
def test_so_they_do_if_it_was_stopped_and_is_killed_by_the_launcher(
    torn: Job, silent: bool
) -> None:
    torn.stopped.add("w1")
    if silent:
        torn.wait(11)
    else:
        torn.train(*range(31, 41))
    killed(torn)
    torn.train(*range(31 if silent else 41, 56))
    killed(torn, "w0")
    due = started_again(torn)
    incident = incident_of(torn)
    assert torn.failures() == [("hang" if silent else "exit", "w1"), ("exit", "w0")]
    assert (incident.outcome, incident.steps_lost, incident.first_new_step) == ("recovered", 35, 56)
    assert incident.recovery_time == pytest.approx(due)
    assert blamed(torn).verdict == "pass"


@pytest.mark.parametrize("own", ["another fault", "a new process"])
def test_what_fails_for_a_reason_of_its_own_does_not(torn: Job, own: str) -> None:
    killed(torn)
    torn.train(*range(31, 34))
    if own == "a new process":
        torn.found("w2")
        torn.train(*range(34, 61))
        killed(torn, "w2")
    else:
        torn.train(*range(34, 61))
        torn.observer.members = {1: "w0"}
        inject(torn, fault="second")
        killed(torn, "w0")
    torn.found("w4", "w5")
    torn.train(*range(21, 101))
    found = measure(torn.log(), None)
    assert found.episodes[0].others == ()
    assert found.incidents[0].first_new_step == 32
    if own == "a new process":
        assert "a failure that no fault explains: w2" in blamed(torn).witness


# ---- the arm


class Closing:
    """A command and its ranks, of which w1 had ended, and w0 is killed with the command."""

    pid, killed = 7, 1

    def __init__(self, ended: CommandEnded | None) -> None:
        self.ended = ended
        self._news = [[gone("w1", 1)], [gone("w0", None, signal.SIGKILL)]]

    def wait(self, timeout_s: float) -> list[ExitedRank]:
        return self._news.pop(0) if self._news else []

    def look(self) -> None:
        self.ended = CommandEnded(exit_code=None, signal=signal.SIGTERM)

    def terminate(self) -> None:
        pass

    def fileno(self) -> int:
        return 0

    def unregister(self, fd: int) -> None:
        pass

    def living(self) -> list[str]:
        return ["w0"] if self._news else []

    def close(self, mark: str) -> int:
        return 0


def gone(name: str, code: int | None, signum: int | None = None) -> ExitedRank:
    return ExitedRank(name=name, pid=3, exit_code=code, signal=signum)


@pytest.mark.parametrize("ended", [None, CommandEnded(exit_code=1, signal=None)])
def test_what_the_harness_ends_is_no_failure_of_the_job(ended: CommandEnded | None) -> None:
    job = begun(*range(1, 31))
    closing: Any = Closing(ended)
    unused = ("arm", "holds_launcher", "ledger", "finder", "listener", "broker", "injector")
    parts: dict[str, Any] = dict.fromkeys([*unused, "leftovers"])
    parts |= {"spec": SimpleNamespace(ranks=2), "prepared": SimpleNamespace(mark="x")}
    watch = RankWatch(
        ranks=closing,
        observer=job.observer,
        record=job.record,
        now_ns=lambda: job.now,
        **parts,
    )
    watch.command, watch.starts = closing, 1
    watch.close(asked=False)
    exits = {e.data["process"]: e.data for e in job.events if e.kind is Kind.PROCESS_EXITED}
    assert job.failures() == [("exit", "w1")], "it had ended before anybody was asked to"
    assert not exits["w1"]["expected"] and "asked_ns" not in exits["w1"]
    assert exits["w0"]["expected"] and exits["w0"]["asked_ns"] == job.now
    assert watch._asked_ns == 0, "what is started next was not asked"
