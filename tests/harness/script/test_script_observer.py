"""What is made of a command's reports and exits, without a process: generations, failures, the
order of an arm.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.support import arms
from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Event, Kind, Log, make_log
from trainchaos.harness.judge.checkers import Evidence
from trainchaos.harness.judge.checkers.job.liveness import liveness
from trainchaos.harness.judge.checkers.job.observed import progress
from trainchaos.harness.judge.measure.incidents import recovery_of
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.observed import from_0, stride_of
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.script.listen.observer import STALL_FLOOR_S, Observer
from trainchaos.harness.script.listen.progress import ProgressReport

S = 1_000_000_000
DEADLINE_S = 60.0
COMMAND = {"command": ["train"], "ranks": 2, "steps": 100, "progress": "beacon"}


class Job:
    """Feeds an observer and keeps what it writes, on a clock of its own."""

    def __init__(self, steps: int = 100, ranks: int = 2) -> None:
        self.events: list[Event] = []
        self.now = 0
        self.steps, self.ranks = steps, ranks
        self.stopped: set[str] = set()
        self.observer = Observer(
            self.record,
            lambda name: "T" if name in self.stopped else "S",
            steps=steps,
            deadline_s=DEADLINE_S,
            source="beacon",
        )
        self.record(Kind.ACTOR_STARTED, pid=1, host="h", wall_ns=0)
        self.record(
            Kind.RUN_STARTED,
            arm="faulted",
            cell="c",
            repeat=0,
            seed=1,
            ranks=ranks,
            spares=0,
            steps=steps,
            global_batch=1,
            strategy="own",
            order={"seed": 0, "samples": 0},
            observed=True,
        )

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        event = Event(
            kind=kind,
            actor=ORCHESTRATOR,
            seq=len(self.events),
            time_ns=self.now,
            generation=self.observer.generation if hasattr(self, "observer") else 0,
            step=step,
            data=data,
        )
        self.events.append(event)
        return event

    def found(self, *names: str) -> None:
        self.now += S
        self.observer.on_ranks(dict(enumerate(names)), self.now)

    def train(
        self,
        *steps: int,
        seconds: float = 0.1,
        rank: int | None = None,
        loss: float | None = None,
        unread: str = "",
        **more: Any,
    ) -> None:
        for step in steps:
            self.now += int(seconds * S)
            self.observer.tick(self.now)
            odd = {"loss": unread} if unread else {}
            self.observer.on_progress(
                ProgressReport(step=step, rank=rank, loss=loss, unread=odd, **more), self.now
            )

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += S // 10
            self.observer.tick(self.now)

    def exit(self, name: str, code: int | None = None, signum: int | None = None) -> None:
        self.observer.on_exit(name, code, signum, self.now)

    def lose(self, name: str, code: int | None = None, signum: int | None = None) -> None:
        """A rank ends, as the orchestrator records it too."""
        self.record(
            Kind.PROCESS_EXITED,
            process=name,
            pid=1,
            exit_code=code,
            signal=signum,
            expected=False,
            last_seq=None,
        )
        self.exit(name, code, signum)

    def restarted(self, *steps: int, **more: Any) -> None:
        """Rank 1 is killed, and all are started anew."""
        self.lose("w1", signum=signal.SIGKILL)
        self.found("w2", "w3")
        self.train(*steps, **more)

    def causes(self) -> list[str]:
        """Why generations began."""
        return [str(e.data["cause"]) for e in self.events if e.kind is Kind.GENERATION_STARTED]

    def failures(self) -> list[tuple[str, str | None]]:
        return [
            (e.data["cause"], e.data["process"])
            for e in self.events
            if e.kind is Kind.FAILURE_DETECTED
        ]

    def log(self, outcome: str = "completed", **facts: Any) -> Log:
        self.now += S
        facts["committed_step"] = self.observer.committed
        self.record(Kind.RUN_FINISHED, outcome=outcome, reason="", **facts)
        return make_log(
            [ActorLog(actor=ORCHESTRATOR, events=tuple(self.events), problems=(), ended=True)]
        )


def begun(*steps: int, **more: Any) -> Job:
    """Two ranks that have done these steps."""
    job = Job()
    job.found("w0", "w1")
    job.train(*steps, **more)
    return job


@pytest.fixture
def job() -> Job:
    return begun()


def test_an_end_with_exit_code_0_is_a_failure_after_a_notice_with_steps_left(job: Job) -> None:
    job.train(*range(1, 31))
    job.observer.on_notice("w1")
    job.exit("w0", code=0)
    assert job.failures() == [], "it was not told to end"
    job.exit("w1", code=0)
    assert job.failures() == [("notice", "w1")] and job.observer.preempted
    job.observer.on_start()
    assert not job.observer.preempted, "a command that was started again has had no notice"


def test_nor_is_it_one_after_the_last_step(job: Job) -> None:
    job.train(*range(1, 101))
    job.observer.on_notice("w1")
    job.exit("w1", code=0)
    assert job.failures() == [] and not job.observer.preempted


def test_ranks_go_on_without_one_that_was_told_to_end(job: Job) -> None:
    job.train(*range(1, 31))
    job.observer.on_notice("w1")
    job.exit("w1", code=0)
    job.train(*range(31, 101))
    assert job.causes() == ["start", "shrunk"]


def test_a_killed_rank_and_its_peers_are_one_failure(job: Job) -> None:
    job.train(*range(1, 31))
    job.exit("w1", signum=signal.SIGKILL)
    job.exit("w0", code=1)
    job.found("w2", "w3")
    job.train(*range(21, 101))
    assert job.failures() == [("exit", "w1")] and job.causes() == ["start", "restart"]
    history = history_of(job.log())
    recovery = recovery_of(history, next(history.log.of(Kind.FAILURE_DETECTED)))
    assert (recovery.high_water, recovery.restored_step) == (30, 20)
    assert recovery.first_new is not None and recovery.first_new.step == 31
    assert history.committed_step == 100 and len(history.lineage) == 100


def test_before_the_first_step_nothing_can_fail(job: Job) -> None:
    job.exit("w1", code=1)
    assert job.failures() == []


def test_a_hang_is_seen_and_blamed_on_the_stopped_one(job: Job) -> None:
    job.train(*range(1, 31))
    job.stopped.add("w1")
    job.wait(STALL_FLOOR_S - 1)
    assert job.failures() == []
    job.wait(2)
    assert job.failures() == [("hang", "w1")]
    job.train(*range(31, 101))
    assert job.causes() == ["start", "resumed"]
    recovery = recovery_of(
        history_of(job.log()), next(e for e in job.events if e.kind is Kind.FAILURE_DETECTED)
    )
    assert recovery.first_new is not None and recovery.first_new.step == 31


def test_a_hang_is_declared_with_how_long_it_took_and_never_sooner(job: Job) -> None:
    job.train(*range(1, 31))
    job.wait(STALL_FLOOR_S + 1)
    (failure,) = (e for e in job.events if e.kind is Kind.FAILURE_DETECTED)
    assert failure.data["silent_s"] > failure.data["limit_s"] == STALL_FLOOR_S


def test_a_process_that_says_it_is_busy_does_not_hang_within_its_limit(job: Job) -> None:
    job.train(*range(1, 30))
    job.observer.on_progress(ProgressReport(step=0, rank=0, busy_s=300), job.now)
    job.wait(299)
    assert job.failures() == [] and job.observer.committed == 29
    job.wait(STALL_FLOOR_S + 2)
    assert job.failures() == [("hang", None)], "and has as long as usual afterwards"


def test_what_an_evaluation_takes_is_not_learned_as_a_step(job: Job) -> None:
    job.train(*range(1, 30))
    job.observer.on_progress(ProgressReport(step=0, rank=0, busy_s=3600), job.now)
    job.wait(600)
    job.observer.on_progress(ProgressReport(step=0, rank=0, busy_s=0), job.now)
    job.train(*range(30, 40))
    assert job.failures() == [] and job.observer.stall_bound_s() == STALL_FLOOR_S
    job.wait(STALL_FLOOR_S + 1)
    assert job.failures() == [("hang", None)]


def test_a_call_of_busy_holds_until_the_next_step(job: Job) -> None:
    job.train(*range(1, 30), rank=0)
    job.observer.on_progress(ProgressReport(step=0, rank=0, busy_s=3600), job.now)
    job.train(30, seconds=20, rank=0)
    job.wait(STALL_FLOOR_S + 1)
    assert len(job.failures()) == 1


def test_the_log_says_what_a_process_does_besides_training_and_for_how_long(job: Job) -> None:
    def busy(rank: int | None, what: str, limit_s: float) -> None:
        job.observer.on_progress(
            ProgressReport(step=0, rank=rank, busy_s=limit_s, what=what), job.now
        )

    job.train(*range(1, 30), rank=0)
    busy(0, "evaluation", 300)
    busy(1, "upload", 60)
    job.wait(20)
    busy(0, "-", 0)
    busy(0, "-", 0)
    busy(None, "compilation", 60)
    job.wait(5)
    job.observer.on_exit("w1", 1, None, job.now)
    busy(None, "export", 60)
    job.wait(2)
    job.train(30, seconds=1)
    said = [
        (event.kind, *event.data.values())
        for event in job.events
        if event.kind in (Kind.BUSY, Kind.BUSY_ENDED)
    ]
    assert said == [
        (Kind.BUSY, 0, "evaluation", 300),
        (Kind.BUSY, 1, "upload", 60),
        (Kind.BUSY_ENDED, 0, "evaluation", 20),
        (Kind.BUSY, None, "compilation", 60),
        (Kind.BUSY_ENDED, 1, "upload", 25),
        (Kind.BUSY_ENDED, None, "compilation", 5),
        (Kind.BUSY, None, "export", 60),
        (Kind.BUSY_ENDED, None, "export", 3),
    ]


def test_the_one_whose_reports_are_behind_hangs(job: Job) -> None:
    for step in range(1, 31):
        job.train(step, rank=0)
        job.train(step, rank=1)
    job.train(31, rank=0)
    job.wait(STALL_FLOOR_S + 1)
    assert job.failures() == [("hang", "w1")]


def test_slow_steps_make_the_bound_longer(job: Job) -> None:
    job.train(*range(1, 11), seconds=2.0)
    job.wait(30)
    assert job.failures() == []
    job.wait(12)
    assert job.failures() == [("hang", None)]


def test_the_step_in_flight_is_no_recovery_but_more_steps_are(job: Job) -> None:
    job.train(*range(1, 31))
    job.exit("w1", signum=signal.SIGKILL)
    job.train(31)
    assert job.causes() == ["start"]
    job.train(*range(32, 101))
    assert job.causes() == ["start", "shrunk"]
    history = history_of(job.log())
    recovery = recovery_of(history, next(history.log.of(Kind.FAILURE_DETECTED)))
    assert recovery.high_water == 31
    assert recovery.first_new is not None and (
        recovery.first_new.step,
        recovery.first_new.world,
    ) == (32, 1)


def test_going_back_without_new_processes_is_a_generation(job: Job) -> None:
    job.train(*range(1, 31), rank=0)
    job.train(*range(21, 101), rank=0)
    assert job.causes() == ["start", "rollback"]
    history = history_of(job.log())
    assert [run.step for run in history.runs if not run.survives] == list(range(21, 31))


def test_lines_of_a_rank_in_another_order_are_no_rollback(job: Job) -> None:
    job.train(*(step for last in range(2, 101, 2) for step in (last, last - 1)), rank=0)
    assert job.causes() == ["start"] and job.observer.finished
    assert len(history_of(job.log()).lineage) == 100


def test_the_same_line_from_every_rank_is_no_rollback(job: Job) -> None:
    for step in range(1, 31):
        job.train(step, step, step - 1)
    assert job.causes() == ["start"] and job.failures() == []


def test_steps_counted_from_zero(job: Job) -> None:
    job.train(*range(0, 100))
    assert job.observer.committed == 100 and job.observer.finished


def test_a_number_that_is_no_step_is_not_taken_for_one(job: Job) -> None:
    job.train(1, 2, 10**11, 3)
    assert job.observer.committed == 3


def test_reports_every_ten_steps() -> None:
    job = Job(steps=95)
    job.found("w0", "w1")
    job.train(*range(10, 70, 10), seconds=1.0)
    job.exit("w0", code=1)
    job.found("w2", "w3")
    job.train(50, 60, 70, 80, 90, seconds=1.0)
    assert job.observer.finished
    history = history_of(job.log())
    assert stride_of(history) == 10
    # one stride too low rather than too high
    assert [g.resume_step for g in history.generations] == [0, 40]
    assert len(history.lineage) == 90
    assert history.lineage[5].seconds == pytest.approx(0.1)
    recovery = recovery_of(history, next(history.log.of(Kind.FAILURE_DETECTED)))
    assert recovery.first_new is not None and recovery.first_new.step == 61
    # step 61 is known to be done with the report of step 70
    assert recovery.first_new.committed_ns == next(
        e.time_ns for e in job.events if e.kind is Kind.STEP_REPORTED and e.step == 70
    )


def test_a_loss_line_before_the_first_step_of_a_new_process_is_not_of_the_old_ones(
    job: Job,
) -> None:
    job.train(*range(1, 31))
    job.restarted(30, loss=2.0, alone=True)
    job.train(*range(21, 101))
    assert [g.resume_step for g in history_of(job.log()).generations] == [0, 20]


def test_times_add_up_and_no_sample_is_claimed(job: Job) -> None:
    job.train(*range(1, 31))
    job.restarted(*range(21, 101))
    measures = measure(job.log(), None)
    split = measures.partition
    assert split.residual_s == pytest.approx(0, abs=1e-9)
    assert split.badput["recomputation"] == pytest.approx(1.0, abs=0.15)
    assert split.badput["regroup"] == pytest.approx(1.0, abs=0.01)
    assert measures.values["samples_lost"] == [] and measures.values["goodput"]


def test_a_report_from_the_future_or_the_past_is_put_in_its_place(job: Job) -> None:
    job.train(1, 2, 3)
    before = job.now
    for said in (before + 10**15, 5):
        job.now += S // 10
        job.observer.on_progress(
            ProgressReport(step=job.observer.committed + 1, time_ns=said), job.now
        )
    said = [e.data["reported_ns"] for e in job.events if e.kind is Kind.STEP_REPORTED]
    assert said == sorted(said) and said[-1] == job.now


def evidence_of(log: Log) -> Evidence:
    """Of one arm."""
    return Evidence(
        arm="faulted",
        cell=arms.cell_of("none", [], workload=COMMAND),
        log=log,
        control=None,
        controls=(),
        exact={},
        source="a.yaml",
        lines={"workload.progress": 8},
    )


def seen(job: Job) -> Finding:
    """What the progress checker says."""
    return progress(evidence_of(job.log()))


def test_a_job_whose_lines_changed_their_form_may_have_gone_on(job: Job) -> None:
    job.train(*range(1, 17))
    found = liveness(evidence_of(job.log("gave-up", changed="after step 16 they changed")))
    assert (found.verdict, found.witness) == (
        "inconclusive",
        "a.yaml:8 (workload.progress): after step 16 they changed",
    )


def test_steps_of_an_epoch_are_no_progress(job: Job) -> None:
    job.train(*range(1, 21))
    job.train(*range(1, 21))
    job.train(*range(1, 21))  # two ranks might have said it all twice, one after the other
    found = seen(job)
    assert found.verdict == "inconclusive"
    assert found.witness.startswith(
        "a.yaml:8 (workload.progress): steps 1 to 20 were reported again without a"
    )


def test_late_ranks_and_restarts_are_no_epochs(job: Job) -> None:
    job.train(*(step for pair in zip(range(1, 21), range(1, 21), strict=True) for step in pair))
    job.train(*range(15, 21))
    job.restarted(*range(5, 31))
    assert seen(job).verdict == "pass"


def test_a_step_beyond_the_last_is_no_step(job: Job) -> None:
    job.train(*range(1, 11), 170)
    assert seen(job).witness.startswith(
        "a.yaml:8 (workload.progress): step 170 was reported, and workload.steps is 100"
    )


@pytest.mark.parametrize("rank", [None, 1])
def test_steps_that_go_on_without_their_ranks(job: Job, rank: int | None) -> None:
    job.train(*range(1, 21), rank=rank)
    job.exit("w1", signum=signal.SIGKILL)
    job.record(Kind.PROCESS_EXITED, process="w1", exit_code=None, signal=9, last_seq=None)
    if rank is None:
        job.exit("w0", signum=signal.SIGKILL)
        job.record(Kind.PROCESS_EXITED, process="w0", exit_code=None, signal=9, last_seq=None)
    assert seen(job).verdict == "pass"
    job.wait(2)
    job.train(*range(21, 31), rank=rank)
    assert "what was hit is not what trains" in seen(job).witness


@pytest.mark.parametrize("last", [24, 100])
def test_steps_that_are_printed_when_all_ranks_are_gone(job: Job, last: int) -> None:
    job.train(*range(1, 21))
    for name in ("w0", "w1"):
        job.exit(name, signum=signal.SIGKILL)
        job.record(Kind.PROCESS_EXITED, process=name, exit_code=None, signal=9, last_seq=None)
    job.train(*range(21, last + 1), seconds=0.001)
    log = job.log() if last == 100 else job.log("gave-up")
    said = progress(evidence_of(log))
    assert (said.verdict == "pass") == (last < 100), "a few may have been on their way"
    assert last < 100 or "w0 ended, yet the steps went on to 100" in said.witness


@pytest.mark.parametrize(
    ("drawn", "steps", "from_the_first"),
    [
        (True, (3, 4, 5, 6), True),
        (False, (3, 4, 5, 6), False),
        (True, (20, 21, 22), False),
        (True, (47, 96, 140), True),
    ],
)
def test_a_bar_that_was_drawn_at_0_began_with_the_first_step(
    drawn: bool, steps: tuple[int, ...], from_the_first: bool
) -> None:
    job = Job(ranks=1, steps=200)
    job.found("w0")
    job.train(*steps)
    assert from_0(history_of(job.log(drawn=drawn))) is from_the_first
