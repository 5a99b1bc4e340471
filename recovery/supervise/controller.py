"""Supervises one job: starts it or takes it over, and detects failures from messages, exits, clocks
and progress marks. ``recovery.supervise.recovery_cycle`` answers them.

A state machine driven from outside: time comes from ``Hands``, and nothing here waits, sleeps or
starts a process itself. The same code supervises real processes and simulated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.strategy import Cause, Form, Health, StateFrom, Strategy
from trainchaos.recovery.process.host import Hands
from trainchaos.recovery.supervise.adoption import Adoption, JobCondition, JobRecord
from trainchaos.recovery.supervise.failures import NOTHING, Symptom
from trainchaos.recovery.supervise.job_state import JobState
from trainchaos.recovery.supervise.process_table import Process
from trainchaos.recovery.supervise.recovery_cycle import RecoveryCycle
from trainchaos.recovery.supervise.supervision import Stage, Timing, check_limits
from trainchaos.recovery.transport import wire
from trainchaos.recovery.transport.versions import misfit

__all__ = ["Controller", "Hands", "Stage", "Timing"]


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


class Controller:
    """Supervises one job under one strategy.

    Call ``start`` or ``adopt`` once, then the ``on_*`` methods and ``tick`` as things happen.
    """

    def __init__(
        self,
        strategy: Strategy,
        hands: Hands,
        *,
        world: int,
        steps: int,
        store_port: int,
        shards: int = 1,
        timing: Timing | None = None,
    ) -> None:
        self.strategy = strategy
        self.hands = hands
        self.timing = timing or Timing()
        check_limits(self.timing)
        self.job = JobState(
            hands,
            self.timing,
            world=world,
            steps=steps,
            shards=shards,
            store_port=store_port,
            live=strategy.spare_sync.sync == "live",
        )
        self._startup = Startup(self.job, strategy)
        self._adoption = Adoption(self.job)
        self._watch = Watch(self.job)
        self._cycle = RecoveryCycle(self.job, strategy)

    # ---- begin and end

    def start(self, state: StateFrom) -> None:
        """Start the first processes. CHECKPOINT: from the newest checkpoint that verifies, if there
        is one.
        """
        if gone := self._startup.begin(state):
            why = f"{gone} failed before training began, and so did the coordinator"
            self.stop("broken", why)

    def adopt(self, known: JobRecord, state: StateFrom) -> None:
        """Take over a running job instead of ``start``: ask every process for its status, and
        continue once all have answered. ``state``: as for ``start``.
        """
        self._cycle.stage = Stage.ADOPTING
        self._adoption.restore(known, state)
        for name, how in known.unnoticed.items():  # all, before anything is concluded from them
            entry = self.job.table[name]
            self.job.table.exited(entry, how)
            self.job.failed(entry, Cause.EXIT, how, NOTHING)
            self._adoption.heard(entry)
        self._adoption.ask()
        self._take_up()

    def _on_status(self, process: Process, status: wire.Status) -> None:
        if not self._adoption.is_answer(status):
            return
        if self.stage is Stage.ADOPTING:
            self._adoption.place(process, status)
        self.job.listens(process, status)
        if process.health is Health.STARTING:  # its ``Ready`` went to the lost supervisor
            self._on_ready(process, {}, status.live)
        self._heard(process)

    def _heard(self, process: Process) -> None:
        self._adoption.heard(process)
        self._take_up()

    def _take_up(self) -> None:
        """Continue from where the job is, as soon as that is known."""
        if self.stage is not Stage.ADOPTING or (found := self._adoption.conclude()) is None:
            return
        cycle, cycle.stage = self._cycle, Stage.TRAINING
        if self.job.failures.states_are_wrong:
            # although all members may have made the last step: one of the states is no valid result
            cycle.stop_generation()
        elif found is JobCondition.NOT_BEGUN:
            cycle.stage = Stage.STARTING
            self.start(self._adoption.state)
            cycle.form_if_ready()
        elif found is JobCondition.COMPLETE:
            cycle.complete()
        elif found is JobCondition.UNDISTURBED:
            cycle.go_on()
        elif self.job.failures.current:
            cycle.stop_generation()
        else:
            cycle.suspect("the coordinator was lost in the middle of a recovery")

    def stop(self, outcome: str, reason: str) -> None:
        """End the job early; every process is killed."""
        self._cycle.stop(outcome, reason)

    # ---- detect: what processes say

    def on_message(self, process: str, message: object) -> None:
        """A process sent a message."""
        entry = self.job.table.get(process)
        if entry is None or entry.health is Health.DEAD or self.stage is Stage.DONE:
            return
        match message:
            case wire.Status():
                self._on_status(entry, message)
            case wire.Ready():
                self._on_ready(entry, message.versions, message.live)
            case wire.Following() if self.job.follows(entry, message):
                self._cycle.became_ready(entry)
            case wire.Settled():
                self.job.settled(entry, message)
                self._cycle.decide_if_parked()
            case wire.Joined():
                self._cycle.joined(entry, message)
            case wire.Parked():
                self._cycle.parked(entry, message)
            case wire.Finished():
                entry.finished, entry.step, entry.valid = True, message.step, True
                self._cycle.end_if_finished()
            case wire.Failed():
                entry.error = message.error
            case wire.Notice():
                self._on_notice(entry)
            case wire.CheckpointNote():
                self.job.meter.saving(message.checkpoint, message.state, self.hands.now_s())
                if message.state == "committed":
                    self.job.digests.saved(message.step)
                    self.job.agreement.note()
            case wire.Unrecoverable():
                self.stop("gave-up", message.error)
            case wire.Digest():
                self._on_digest(entry, message)
            case wire.Recalled():
                self.job.progress.evidence.recalled(process, message)
            case wire.StoodBy():
                self.job.formation.standby.formed(process, message)
            case wire.SetAside():
                self.job.agreement.set_aside(message.doubts)

    def _on_ready(self, process: Process, versions: Mapping[str, str], live: str) -> None:
        known, process.versions = process.health is not Health.STARTING, versions
        if not known:
            process.live = live
            self.job.is_ready(process)
        if why := misfit(versions, self.job.table.other_versions(process)):
            self._fail(process, Cause.UNFIT, why)
        elif not known:
            # else its answer to this supervisor came first, and it may be in a generation by now
            self._cycle.became_ready(process)

    def _on_notice(self, process: Process) -> None:
        """A process will be ended soon."""
        if process.noticed or self.stage is Stage.ENDING:
            return
        has_place = self.job.noticed(process)
        if self.stage is not Stage.ADOPTING:
            self._cycle.noticed(process, has_place=has_place)
        elif process.health is Health.DEAD:
            self._heard(process)

    def _on_digest(self, process: Process, message: wire.Digest) -> None:
        digests = self.job.digests
        found = digests.note(process.name, message.generation, message.step, message.digest)
        self.job.agreement.note()
        if found is not None and self.stage is Stage.ADOPTING:
            # The process reported the lost supervisor's notice; it is answered once all processes
            # are located. If this supervisor is lost before that, the next one answers it. Later
            # steps show the same.
            if not any(one.cause is Cause.DIVERGED for one in self.job.failures.current):
                self.job.differ(found)
        elif found is not None and self.stage in (Stage.TRAINING, Stage.PAUSING, Stage.STOPPING):
            self._cycle.differ(found)

    # ---- detect: what is said of the places of processes

    def on_warnings(self, warnings: Mapping[str, str]) -> None:
        """The devices or nodes of these processes are about to fail. ``warnings``: process -> why,
        for people. A further warning of the same process changes nothing.
        """
        if self.stage in (Stage.ADOPTING, Stage.ENDING, Stage.DONE):
            return
        entries = [(self.job.table.get(name), why) for name, why in warnings.items()]
        new = [
            (entry, why)
            for entry, why in entries
            if entry is not None and entry.health is not Health.DEAD and not entry.warned
        ]
        # all, before anything is decided: a spare on the same node is of no use
        placed = [self.job.warned(entry, why) for entry, why in new]
        if new:
            self._cycle.warned(member=any(placed))

    def no_better_place(self, processes: Iterable[str]) -> None:
        """These were started where a failure is expected, as there is no other place: they serve
        like any other, but no rank moves to them.
        """
        for name in processes:
            entry = self.job.table.get(name)
            if entry is not None and entry.health is not Health.DEAD:
                entry.warned = True

    # ---- detect: how processes end

    def on_dying(self, process: str) -> None:
        """A process is ending and trains no more; ``on_exit`` follows. This warning may be
        missing.
        """
        entry = self.job.table.get(process)
        if entry is None or self.stage in (Stage.ENDING, Stage.DONE):
            return
        if entry.health is not Health.DEAD:
            entry.health = Health.DEAD
            self._fail(entry, Cause.EXIT, entry.error or "its process ends")

    def on_exit(self, process: str, how: str) -> None:
        """A process has exited. ``how``: for people, such as ``signal 9``."""
        entry = self.job.table.get(process)
        if entry is None:
            return
        given_up = entry.health is Health.DEAD
        self.job.table.exited(entry, how)
        if self.stage is Stage.ENDING:
            self._cycle.end_if_gone()
        elif not given_up:
            self._fail(entry, Cause.EXIT, f"{how}: {entry.error}" if entry.error else how)

    def store_is_at(self, port: int) -> None:
        """Groups connect through this store from now on; one that is being formed through another
        store is broken.
        """
        if port != self.job.formation.store_port:
            self.job.formation.store_port = port
            if self.stage is Stage.FORMING:
                self._cycle.suspect("the key-value store was lost while the group formed")

    # ---- detect: what clocks and marks show

    def tick(self) -> None:
        """Check clocks and marks; call every few milliseconds to tens of milliseconds."""
        now, cycle = self.hands.now_s(), self._cycle
        self.job.progress.evidence.look()
        match self.stage:
            case Stage.ADOPTING:
                self._take_up()
            case Stage.TRAINING | Stage.PAUSING:
                committed = self.committed  # takes a while in a large job
                self.job.meter.saw(len(self.members), committed, now)
                if (news := self.job.progress.detector.pace.news()) is not None:
                    self.hands.record(Kind.PACE_LEARNED, generation=self.generation, **news)
                self._answer(self._watch.at_work())
                cycle.replace_lost(now, committed)
            case Stage.STOPPING:
                self._answer(cycle.parking.overdue(now))
                if cycle.parking.lacks_cause(now):
                    cycle.decide_if_parked()
            case Stage.FORMING:
                self._answer(self._watch.forming(now))
        if self.stage in (Stage.STARTING, Stage.WAITING, Stage.TRAINING):
            # at the start this would end the job; the process may still continue in time
            begun = self.stage is not Stage.STARTING
            self._answer(self._watch.starting(now, stopped_too=begun))
        if self.stage is Stage.ENDING:
            cycle.end_by_force(now)

    @property
    def look_in_s(self) -> float:
        """Seconds until ``tick`` has to be called again: ``tick_s``, less where a rank is late by
        then.
        """
        at_work = self.stage in (Stage.TRAINING, Stage.PAUSING)
        return self._watch.due_s if at_work else self.timing.tick_s

    def _answer(self, symptoms: Iterable[Symptom]) -> None:
        for found in symptoms:
            if found.process is None:
                marks = {name: self.hands.mark(name) for name in self.members}
                self._cycle.suspect(found.detail)
                self.job.progress.evidence.stuck(marks)
            else:
                self._fail(found.process, found.cause, found.detail, found.measured)

    # ---- a failure

    def _fail(
        self, process: Process, cause: Cause, detail: str, measured: Mapping[str, Any] = NOTHING
    ) -> None:
        has_place = self.job.failed(process, cause, detail, measured)
        if self.stage is Stage.ADOPTING:
            self._heard(process)
        elif self.stage is not Stage.STARTING:
            self._cycle.failed(process, has_place=has_place)
        elif self._startup.can_replace(process):
            self._startup.replace(process)
            self._cycle.form_if_ready()
        else:
            self.stop("broken", f"{process.name} failed before training began: {detail}")
        if cause is Cause.HANG:  # last: the survivors do not wait for it
            self.job.progress.evidence.hung(process.name, self.hands.mark(process.name))

    # ---- the state of the job

    @property
    def stage(self) -> Stage:
        """Where the job is."""
        return self._cycle.stage

    @property
    def done(self) -> bool:
        """The job is over and every process has exited."""
        return self.stage is Stage.DONE

    @property
    def outcome(self) -> str:
        """Outcome of the job, once it ends; empty before."""
        return self._cycle.outcome

    @outcome.setter
    def outcome(self, outcome: str) -> None:
        self._cycle.outcome = outcome

    @property
    def reason(self) -> str:
        """Why the job ended, for people."""
        return self._cycle.reason

    @reason.setter
    def reason(self, reason: str) -> None:
        self._cycle.reason = reason

    @property
    def steps(self) -> int:
        """Steps after which the job is complete; a script reports the number only when it is
        ready.
        """
        return self.job.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self.job.steps = steps

    @property
    def members(self) -> tuple[str, ...]:
        """Processes of the current generation by rank."""
        return self.job.members

    @property
    def generation(self) -> int:
        """Number of the current generation, 0 before the first."""
        return self.job.generation

    @property
    def committed(self) -> int:
        """Highest step that all members have committed and that was not rolled back, as far as is
        known.
        """
        return self.job.progress.committed
