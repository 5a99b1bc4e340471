"""The loop of an arm, around a job in which nothing is real: what ends it, and what it leaves."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.simulate import cell_of
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind, read_actor
from trainchaos.harness.arm.observer import ArmObserver, Timers, Vitals
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.recovery.supervise.loop import Loop
from trainchaos.recovery.supervise.supervision import StopFlag

SECOND = 1_000_000_000
COMPLETED, DEADLINE = ("completed", ""), ("timed-out", "no step for 1 s")


class FakeJob(Loop):
    """Makes a turn each second, and does ``acts`` in it. ``calls``: of its methods, in order."""

    generation = 1
    outcome = reason = ""

    def __init__(self, *acts: Callable[[FakeJob], None]) -> None:
        self.stop_flag, self.acts = StopFlag(), list(acts)
        self.calls: list[str] = []
        self.committed = self.now_ns = 0
        self.progress_ns: int | None = None
        self.late: tuple[str, str] | None = None

    @property
    def ending(self) -> bool:
        return bool(self.outcome)

    over = ending

    def introduce(self) -> None:
        self.record(Kind.ACTOR_STARTED, pid=1, host="here", wall_ns=1)

    def start(self) -> None:
        self.observer.before_start()
        self.calls.append("start")

    def turn(self) -> None:
        self.calls.append("turn")
        self.now_ns += SECOND
        if self.acts:
            self.acts.pop(0)(self)

    def settle(self) -> None:
        self.calls.append("settle")

    def vitals(self) -> Vitals:
        progress_ns = self.now_ns if self.progress_ns is None else self.progress_ns
        return Vitals(progress_ns=progress_ns, healthy=None)

    def out_of_patience(self) -> tuple[str, str] | None:
        return self.late

    def stop(self, outcome: str, reason: str) -> None:
        if not self.outcome:
            self.outcome, self.reason = outcome, reason  # type: ignore[misc]

    fail = stop

    def end_processes(self) -> None:
        self.calls.append("end")

    def release(self) -> None:
        self.calls.append("release")

    def account(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        left: dict[str, list[object]] = {"processes": [], "ports": [], "shared_memory": []}
        return left, {"committed_step": self.committed}


class FakeFaults:
    """``seen``: events that it was shown."""

    def __init__(self, job: FakeJob) -> None:
        self._job = job
        self.seen: list[Kind] = []

    def announce(self) -> None:
        self._job.calls.append("announce")

    def observe(self, event: Event) -> None:
        self.seen.append(event.kind)

    def close(self) -> None:
        self._job.calls.append("heal")


class Shown:
    """Keeps the events that a person would see."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        self.kinds.append(event.kind)

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None: ...


class Arm:
    """A loop with all that it needs; stops after 3 s without a step, and at a second failure."""

    def __init__(self, root: Path, job: FakeJob) -> None:
        conditions = ["no_committed_step_for > 3s", "failures > 1"]
        cell = cell_of("hot-spare", [], stop_conditions=[{"when": when} for when in conditions])
        run = RunDirectory(root)
        run.make_arm("control")
        data = DataInfo(path=root, samples=1, digest="", about="nothing")
        setup = ArmSetup(
            id="control", cell=cell, repeat=0, arm="control", seed=1, run=run, data=data
        )
        self.shown, self.faults = Shown(), FakeFaults(job)
        self.timers = Timers(lambda: job.now_ns)
        job.log = EventWriter(run.events("control"), ORCHESTRATOR, self.timers.now_ns)
        job.observer = ArmObserver(setup, job, self.faults, self.timers, self.shown)
        self._log = run.events("control") / f"{ORCHESTRATOR}.jsonl"

    def finished(self) -> tuple[str, str]:
        (event,) = [e for e in read_actor(self._log).events if e.kind is Kind.RUN_FINISHED]
        return event.data["outcome"], event.data["reason"]


def stops(*how: str) -> Callable[[FakeJob], None]:
    return lambda job: job.stop(*how)


def passes(job: FakeJob) -> None:
    """A turn in which nothing happens."""


def test_an_arm_is_played_from_its_first_event_to_its_last(memory: Path) -> None:
    job = FakeJob(passes, stops(*COMPLETED))
    arm = Arm(memory, job)
    assert job.run() == "completed" and arm.finished() == COMPLETED
    turns = ["turn", "settle"] * 2
    assert job.calls == ["announce", "start", *turns, "end", "heal", "release"]
    kinds = [Kind.ACTOR_STARTED, Kind.LEFTOVERS, Kind.RUN_FINISHED]
    assert arm.shown.kinds == arm.faults.seen == kinds


def test_a_signal_ends_the_job_before_any_condition_does(memory: Path) -> None:
    job = FakeJob()
    job.progress_ns, job.late = -9 * SECOND, DEADLINE
    arm = Arm(memory, job)
    job.stop_flag.signum = signal.SIGINT
    assert job.run() == "interrupted" and arm.finished() == ("interrupted", "SIGINT")


@pytest.mark.parametrize(
    ("progress_s", "late", "expected"),
    [
        (0, None, ("halted", "no_committed_step_for > 3s", 4)),
        (0, DEADLINE, (*DEADLINE, 1)),
        (-9, DEADLINE, ("halted", "no_committed_step_for > 3s", 1)),
    ],
    ids=["condition", "deadline of the job", "both at once"],
)
def test_a_condition_of_the_scenario_or_the_jobs_own_deadline_ends_it(
    progress_s: int, late: tuple[str, str] | None, expected: tuple[str, str, int], memory: Path
) -> None:
    job = FakeJob()
    job.progress_ns, job.late = progress_s * SECOND, late
    arm = Arm(memory, job)
    job.run()
    assert (*arm.finished(), job.calls.count("turn")) == expected


def test_failures_that_are_recorded_count_and_faults_see_them(memory: Path) -> None:
    job = FakeJob()
    arm = Arm(memory, job)

    def fails(_: FakeJob) -> None:
        about = {"failure": 1, "cause": "exit", "process": "w0", "rank": 0, "detail": ""}
        job.record(Kind.FAILURE_DETECTED, **about)

    job.acts = [fails, passes, fails]
    job.run()
    assert arm.finished() == ("halted", "failures > 1: failures is 2")
    assert job.calls.count("turn") == 3 and arm.faults.seen.count(Kind.FAILURE_DETECTED) == 2


def test_what_is_set_for_later_is_done_in_the_turn_in_which_it_is_due(memory: Path) -> None:
    job, done = FakeJob(passes, passes, passes, stops(*COMPLETED)), list[int]()
    arm = Arm(memory, job)
    arm.timers.later(2.5, lambda: done.append(job.now_ns // SECOND))
    arm.timers.later(60, lambda: done.append(-1))
    job.run()
    assert done == [3]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(RuntimeError("no"), "broken"), (KeyboardInterrupt(), "interrupted")],
    ids=lambda value: str(value),
)
def test_an_error_leaves_nothing_behind_and_is_raised_again(
    error: BaseException, outcome: str, memory: Path
) -> None:
    def raises(_: FakeJob) -> None:
        raise error

    job = FakeJob(raises)
    arm = Arm(memory, job)
    with pytest.raises(type(error)):
        job.run()
    assert job.calls[-3:] == ["end", "heal", "release"]
    assert arm.finished() == (outcome, f"{type(error).__name__}: {error}")


def test_the_machine_is_let_go_of_when_processes_cannot_be_ended(memory: Path) -> None:
    job = FakeJob(stops(*COMPLETED))

    def refuses() -> None:
        raise OSError("no space left")

    job.end_processes = refuses  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space left"):
        Arm(memory, job)
        job.run()
    assert job.calls[-1] == "release"
