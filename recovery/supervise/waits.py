"""What a controller waits for: processes that start, members that show progress, and survivors that
leave a generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.strategy import Cause, Form, Health, StateFrom, Strategy
from trainchaos.recovery.spares.standing import SETTLE_SILENCE_S
from trainchaos.recovery.supervise.failures import Symptom
from trainchaos.recovery.supervise.job_state import JobState
from trainchaos.recovery.supervise.process_table import Process

EARLY_TRIES = 4
"""Processes started per wanted process at most, while machines are lost before training begins."""


class Startup:
    """Starts ranks and spares as the strategy wants them."""

    def __init__(self, job: JobState, strategy: Strategy) -> None:
        self._job = job
        self._strategy = strategy

    def begin(self, state: StateFrom) -> str | None:
        """Start the processes that are missing, and decide on the first generation. CHECKPOINT:
        from the newest checkpoint that verifies, if there is one.

        Returns the name of a process that failed under an earlier supervisor, without which the job
        cannot begin; then nothing is done.
        """
        table = self._job.table
        gone = [p.name for p in table if p.health is Health.DEAD and not p.noticed]
        if gone:
            return gone[0]
        roles = [p.role for p in table if p.health is not Health.DEAD]
        lacking = self._job.world - roles.count("worker")
        self._job.hands.expect("worker", self._strategy.start_mode, lacking)
        for _ in range(lacking):
            self._spawn_worker()
        for _ in range(self._strategy.spares_wanted - roles.count("spare")):
            table.spawn("spare", "warm")
        living = [p for p in table if p.health is not Health.DEAD]
        first = tuple(p.name for p in living if p.role == "worker")
        self._job.formation.want(Form(members=first, state=state, cause="start"), ())
        return None

    def can_replace(self, process: Process) -> bool:
        """Whether the process leaves because its machine does, and another may take its place."""
        wanted = self._job.world + self._strategy.spares_wanted
        early = self._job.table.started < EARLY_TRIES * wanted
        return self._strategy.replaces and process.noticed and early

    def replace(self, process: Process) -> None:
        """Start another process in its place. The job loses nothing with it."""
        if self._job.formation.awaits(process.name):
            self._job.failures.current.clear()  # no generation broke
            self._job.formation.exchange(process.name, self._spawn_worker())

    def _spawn_worker(self) -> str:
        return self._job.table.spawn("worker", self._strategy.start_mode)


SOONEST_S = 0.005
"""Shortest interval between two checks, however soon a rank is late: one that is starved of CPU may
stay late for long.
"""


class Watch:
    """Checks a job for hangs. Each method yields its findings one by one, so that the answer to a
    symptom takes effect before the next check.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job

    @property
    def due_s(self) -> float:
        """Seconds until the members at work have to be checked again, at the latest."""
        return min(self._job.timing.tick_s, max(SOONEST_S, self._job.progress.detector.due_s))

    def at_work(self) -> Iterator[Symptom]:
        """The member that hangs, or no process when all hang and none can be blamed."""
        job = self._job
        training = job.table.training()
        at_work = [member.name for member in training if not member.finished]
        hang = job.progress.look(job.generation, at_work, others_done=len(at_work) < len(training))
        if hang is not None:
            yield Symptom(
                process=job.table[hang.process] if hang.process else None,
                cause=Cause.HANG,
                detail=hang.detail,
                measured=hang.measured,
            )

    def forming(self, now_s: float) -> Iterator[Symptom]:
        """A member that is stopped and will not join, or a group without any sign of life.

        The members all wait for each other here, so that the marks of a single one tell nothing;
        but while one of them reads, restores or copies, there is progress. Whether a process on a
        silent node is stopped is unknown.
        """
        job, limit_s = self._job, self._job.timing.join_timeout_s
        stopped = job.table.stopped(now_s, job.timing.hang.stopped_s)
        moving = job.progress.moved(job.members) or bool(job.table.unheard())
        late = job.formation.is_late(now_s, moving=moving)
        if stopped:
            detail = "stopped while the group forms"
            yield Symptom(process=stopped[0], cause=Cause.HANG, detail=detail)
        elif late:
            detail = f"the group did not form: no progress for {limit_s:g} s"
            yield Symptom(process=None, cause=Cause.ERROR, detail=detail)

    def starting(self, now_s: float, *, stopped_too: bool) -> Iterator[Symptom]:
        """Processes that are not ready in time. ``stopped_too``: also those that are stopped."""
        table, timing = self._job.table, self._job.timing
        late = table.overdue(now_s)
        stopped = table.stopped_starting(now_s, timing.hang.stopped_s)
        for process in (*late, *(stopped if stopped_too else ())):
            if process.health is not Health.STARTING:
                continue  # the answer to the previous symptom has ended this process
            if process in late:
                detail = f"not ready after {timing.start_timeout_s:.0f} s"
                yield Symptom(process=process, cause=Cause.START_TIMEOUT, detail=detail)
            else:
                detail = "stopped while it starts"
                yield Symptom(process=process, cause=Cause.HANG, detail=detail)


class Parking:
    """The wait for the survivors of each generation in turn."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._deadline_s = 0.0
        self._patience_s = 0.0
        self._unforced = False  # survivors park by themselves
        self._settle_by_s: float | None = None  # spares were asked what they hold

    def abort(self) -> None:
        """Order every survivor to leave: a cascade from neighbour to neighbour is not enough."""
        job, limit_s = self._job, self._job.timing.park_timeout_s
        self._unforced = False
        self._deadline_s = job.hands.now_s() + limit_s
        job.progress.aborted(limit_s)
        job.table.abort(job.generation)

    def let_park(self, patience_s: float) -> None:
        """Let the survivors park by themselves; abort them after ``patience_s`` seconds without a
        sign of life.
        """
        self._unforced, self._patience_s = True, patience_s
        self._deadline_s = self._job.hands.now_s() + patience_s

    def overdue(self, now_s: float) -> Iterator[Symptom]:
        """Survivors that hang: those that stay in a generation that was aborted."""
        job = self._job
        if self._unforced:
            if job.progress.moved(job.members):  # they look for a sample that no rank can compute
                self._deadline_s = max(self._deadline_s, now_s + self._patience_s)
            elif now_s > self._deadline_s:
                self.abort()
            return
        staying = [process.name for process in job.table.training()]
        for name, measured in job.progress.staying(staying).items():
            yield Symptom(
                process=job.table[name],
                cause=Cause.HANG,
                detail="did not leave an aborted generation",
                measured=measured,
            )

    def lacks_cause(self, now_s: float) -> bool:
        """Whether all survivors have left in time and none died: then the connection failed; or
        spares have not said in time what they hold.
        """
        table, current = self._job.table, self._job.failures.current
        if self._settle_by_s is not None:
            return now_s > self._settle_by_s
        return (
            not self._unforced and now_s > self._deadline_s and not current and not table.training()
        )

    def conclude(self) -> bool:
        """Whether all survivors have left and a failure has to be answered; if so, the state each
        holds is recorded. A suspicion becomes a failure of an unknown process when its grace is
        over. Where no rank holds a whole state, spares that follow the job say what they hold.
        """
        job, failures = self._job, self._job.failures
        if job.table.some_train:
            return False
        if not failures.current:
            if failures.suspected_s is None:
                return False
            patience_s = failures.suspected_s + job.timing.blame_grace_s
            if job.hands.now_s() < patience_s:
                self._deadline_s = patience_s  # the cause may be a death not reported yet
                return False
            step = job.progress.committed + 1
            job.blame([], Cause.ERROR, failures.suspicion, step)
        if self._spares_settle():
            return False
        parked = [p for p in job.table.member_processes() if p.health is Health.PARKED]
        held = {p.name: {"step": p.step, "valid": p.valid, "pending": p.pending} for p in parked}
        spares = {p.name: p.step for p in job.table.where(Health.READY) if p.live and p.valid}
        said: dict[str, Any] = {"spares": spares} if spares else {}
        job.hands.record(Kind.SURVIVORS_PARKED, processes=held, **said)
        return True

    def _spares_settle(self) -> bool:
        job, now_s = self._job, self._job.hands.now_s()
        if self._settle_by_s is None:
            job.ask_spares()
            self._settle_by_s = now_s + job.timing.park_timeout_s + SETTLE_SILENCE_S
        if job.spares_settle and now_s <= self._settle_by_s:
            return True
        self._settle_by_s = None
        return False
