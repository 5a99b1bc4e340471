"""Supervises one job: hears what happens, asks the strategy, and has its decisions carried out.

A state machine driven from outside: time comes from ``Hands``, nothing here waits, sleeps or starts
a process itself. The same code supervises real processes and simulated ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from chaos.events.log import Kind
from recovery.policy.replacement_delay import Settling
from recovery.policy.strategy import (
    Cause,
    ClusterView,
    Decision,
    Failure,
    Form,
    Health,
    Pause,
    StateFrom,
    Strategy,
)
from recovery.supervise import limits
from recovery.supervise.corruption import Corruptions
from recovery.supervise.divergence import DigestBook
from recovery.supervise.excluded_samples import Skips
from recovery.supervise.execute import carry_out
from recovery.supervise.failures import NOTHING, FailureBook
from recovery.supervise.formation import Formation
from recovery.supervise.lookout import Lookout
from recovery.supervise.process_table import Crew, Process
from recovery.supervise.progress import ProgressWatch
from recovery.supervise.supervision import Hands, Stage, Timing
from recovery.transport.versions import misfit
from recovery.transport.wire import (
    CheckpointNote,
    Digest,
    Failed,
    Finished,
    Joined,
    Notice,
    Parked,
    PauseRequest,
    Ready,
    SetAside,
    Status,
    Unrecoverable,
)

__all__ = ["Controller", "Hands", "Stage", "Timing"]


class Controller(Corruptions, Lookout):
    """Supervises one job under one strategy.

    Call ``start`` once, then the ``on_*`` methods and ``tick`` as things happen.
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
        self.world = world
        self.shards = shards
        self.steps = steps
        self.timing = timing or Timing()
        limits.check(self.timing)
        self.stage = Stage.STARTING
        self.outcome = ""
        self.reason = ""
        self._crew = Crew(hands, start_timeout_s=self.timing.start_timeout_s)
        self._failures = FailureBook(hands, max_attempts=self.timing.max_attempts)
        self._progress = ProgressWatch(hands, self.timing.hang, shards=shards)
        self._formation = Formation(
            hands,
            self._crew,
            shards=shards,
            store_port=store_port,
            join_timeout_s=self.timing.join_timeout_s,
        )
        self._skips = Skips(hands, self._failures)
        self._deadline_s = 0.0
        self._abort_due = self._pause_saves = False
        self._patience_s = 0.0
        self._again_s = math.inf
        self._digests = DigestBook()
        self._agreement = (0, None)
        self._settling = Settling(self.timing.settle_timeout_s)

    # ---- inputs

    def start(self, state: StateFrom) -> None:
        """Start the first processes. CHECKPOINT: from the newest checkpoint that verifies, if there
        is one.
        """
        for _ in range(self.world):
            self._crew.spawn("worker", self.strategy.start_mode)
        for _ in range(self.strategy.spares_wanted):
            self._crew.spawn("spare", "warm")
        first = tuple(p.name for p in self._crew if p.role == "worker")
        self._formation.want(Form(members=first, state=state, cause="start"), ())

    def stop(self, outcome: str, reason: str) -> None:
        """End the job early; every process is killed."""
        if self.stage in (Stage.ENDING, Stage.DONE):
            return
        self.outcome, self.reason = outcome, reason
        self._end(kill=True)

    def on_message(self, process: str, message: object) -> None:
        """A process sent something."""
        entry = self._crew.get(process)
        if entry is None or entry.health is Health.DEAD or self.stage is Stage.DONE:
            return
        match message:
            case Status():
                self._on_status(entry, message)
            case Ready():
                self._on_ready(entry, message.versions)
            case Joined():
                self._on_joined(entry, message)
            case Parked():
                self._on_parked(entry, message)
            case Finished():
                entry.finished, entry.step, entry.valid = True, message.step, True
                self._end_if_finished()
            case Failed():
                entry.error = message.error
            case Notice():
                self._on_notice(entry)
            case CheckpointNote() if message.state == "committed":
                self._digests.saved(message.step)
                self._note_agreed()
            case Unrecoverable():
                self.stop("gave-up", message.error)
            case Digest():
                self._on_digest(entry, message)
            case SetAside():
                self._on_set_aside(message)

    def on_dying(self, process: str) -> None:
        """A process is ending and trains no more; ``on_exit`` follows. There may be no such
        warning.
        """
        entry = self._crew.get(process)
        if entry is None or self.stage in (Stage.ENDING, Stage.DONE):
            return
        if entry.health is not Health.DEAD:
            entry.health = Health.DEAD
            self._fail(entry, Cause.EXIT, entry.error or "its process ends")

    def on_exit(self, process: str, how: str) -> None:
        """A process is gone. ``how``: for people, such as ``signal 9``."""
        entry = self._crew.get(process)
        if entry is None:
            return
        given_up = entry.health is Health.DEAD
        self._crew.exited(entry, how)
        if self.stage is Stage.ENDING:
            self._finish_if_gone()
        elif not given_up:
            self._fail(entry, Cause.EXIT, f"{how}: {entry.error}" if entry.error else how)

    def store_is_at(self, port: int) -> None:
        """Groups meet there from now on; one that is being formed elsewhere is broken."""
        if port != self._formation.store_port:
            self._formation.store_port = port
            if self.stage is Stage.FORMING:
                self._suspect("the key-value store was lost while the group formed")

    # ---- readiness and forming

    def _on_ready(self, entry: Process, versions: Mapping[str, str] | None = None) -> None:
        known, entry.versions = entry.health is not Health.STARTING, versions or {}
        if not known:
            entry.health = Health.READY
            self.hands.record(Kind.PROCESS_READY, process=entry.name)
        if why := misfit(entry.versions, self._crew.other_versions(entry)):
            self._fail(entry, Cause.UNFIT, why)
            return
        # by its answer to who took over, which came first: it may be in a generation by now
        if known:
            return
        self._skips.tell(entry)  # before it is needed
        if self.stage in (Stage.STARTING, Stage.WAITING):
            self._form_if_ready()
        elif self.stage is Stage.TRAINING:
            self._act(self.strategy.on_ready(self._view()))

    def _form_if_ready(self) -> None:
        if self._formation.can_begin(with_spares=self.stage is Stage.STARTING):
            self._form()

    def _form(self) -> None:
        for entry in self._crew.where(Health.PARKED):
            if self._formation.benches(entry.name):
                self._crew.bench(entry)
            elif not self._formation.awaits(entry.name):
                self._crew.fence(entry)
        self.stage = Stage.FORMING
        self._deadline_s = self.hands.now_s() + self.timing.join_timeout_s
        word = self._digests.word
        self._formation.begin(tell=self._skips.tell, examine=self._skips.examine, word=word)
        self._digests.began(self.generation, self.members, shards=self.shards)

    def _on_joined(self, entry: Process, message: Joined) -> None:
        held = self._formation.joined(entry, message) if self.stage is Stage.FORMING else None
        if held is None or self._refuse_start(held):
            return
        self._formation.ready(message.step)
        self._failures.answered(self._formation.answer)
        self._note_formed(message.step if self._formation.afresh else None)
        self.stage = Stage.TRAINING
        self._progress.resumed(self.generation, self.members, message.step)
        self._settling.began(message.step, self.hands.now_s())
        self._answer_notices()
        self._end_if_finished()

    # ---- failures

    def _on_notice(self, entry: Process) -> None:
        """A process will be ended soon. Whoever only waits goes at once; a member when the strategy
        has it leave.
        """
        if entry.noticed or self.stage is Stage.ENDING:
            return
        entry.noticed = True
        detail = "told by SIGTERM that it will be ended soon"
        self._failures.history.append(
            self._declare(entry, Cause.NOTICE, self._crew.step_of(entry), detail)
        )
        if self._crew.rank_of(entry.name) is not None or self._formation.awaits(entry.name):
            answer = self.strategy.on_notice
        else:
            self._crew.fence(entry)
            answer = self.strategy.on_spare_lost
        if self.stage is Stage.ADOPTING:
            if entry.health is Health.DEAD:
                self._heard(entry)
        elif self.stage in (Stage.STARTING, Stage.WAITING):
            self._form_if_ready()  # it may be the one that was waited for
        elif self.stage is Stage.TRAINING:
            self._act(answer(self._view()))
        elif self.stage is Stage.PAUSING and entry.name in self.members:
            # With this one gone too, what was to be left to others may have to be saved.
            more = answer(self._view())
            if Pause(save=True) in more.actions:
                self._act(more)

    def _fail(
        self, entry: Process, cause: Cause, detail: str, measured: Mapping[str, Any] = NOTHING
    ) -> None:
        failure = self._declare(entry, cause, self._crew.step_of(entry), detail, measured)
        if entry.health is not Health.DEAD and cause in (
            Cause.HANG,
            Cause.START_TIMEOUT,
            Cause.UNFIT,
        ):
            self._crew.kill(entry)  # a hung process may take a while to die; nobody waits for it
        concerned = self._crew.rank_of(entry.name) is not None or self._formation.awaits(entry.name)
        (self._failures.current if concerned else self._failures.history).append(failure)
        if self.stage is Stage.ADOPTING:
            self._heard(entry)
        elif self.stage is Stage.STARTING and not self._left_early(entry):
            self.stop("broken", f"{entry.name} failed before training began: {detail}")
        elif self.stage is Stage.STARTING:
            self._begin_without(entry)
        elif self.stage is Stage.STOPPING:
            self._decide_if_parked()
        elif self.stage is Stage.WAITING and self._formation.awaits(entry.name):
            self._formation.drop()
            self._decide()
        elif self.stage is not Stage.WAITING and concerned:
            self._stop_generation()
        elif self.stage is Stage.TRAINING:
            self._act(self.strategy.on_spare_lost(self._view()))

    def _declare(
        self,
        who: Process | None,
        cause: Cause,
        step: int,
        detail: str,
        measured: Mapping[str, Any] = NOTHING,
    ) -> Failure:
        where = {"step": step, "generation": self.generation, "size": len(self.members)}
        return self._failures.declare(who, cause, detail=detail, measured=measured, **where)

    def _stop_generation(self) -> None:
        """Have every survivor leave the generation at once, or replace all where the strategy keeps
        none.
        """
        self.stage = Stage.STOPPING
        self._failures.forget_suspicion()
        if not self.strategy.keeps_survivors:
            self._decide()
            return
        self._abort()
        self._decide_if_parked()

    def _abort(self) -> None:
        """Told to every survivor from here: a cascade from neighbour to neighbour is not enough."""
        self.stage = Stage.STOPPING
        self._abort_due = False
        self._deadline_s = self.hands.now_s() + self.timing.park_timeout_s
        self._progress.aborted(self.timing.park_timeout_s)
        self._crew.abort(self.generation)

    def _on_parked(self, entry: Process, message: Parked) -> None:
        if message.generation != self.generation or self._crew.rank_of(entry.name) is None:
            return
        entry.health, entry.step, entry.valid = Health.PARKED, message.step, message.valid
        entry.finished, entry.pending = False, message.pending
        self._skips.note(entry.name, message.samples)
        if self._hears_refusal(message):
            return
        if self.stage is Stage.STOPPING:
            self._decide_if_parked()
        elif message.why == "pause" and self.stage is Stage.PAUSING:
            if self._crew.all_parked:
                self._act(self.strategy.on_paused(self._view()))
        elif message.why != "pause":
            self._suspect(message.error)

    def _suspect(self, why: str) -> None:
        """A collective failed and nobody is known to be dead: break the group, await the cause."""
        if self.stage in (Stage.TRAINING, Stage.PAUSING, Stage.FORMING):
            self._failures.suspect(why)
            self._abort()

    def _decide_if_parked(self) -> None:
        if self.stage is not Stage.STOPPING:
            return
        if self._crew.some_train:
            return
        if not self._failures.current:
            if self._failures.suspected_s is None:
                return
            patience_s = self._failures.suspected_s + self.timing.blame_grace_s
            if self.hands.now_s() < patience_s:
                self._deadline_s = patience_s  # the cause may be a death not reported yet
                return
            failure = self._declare(None, Cause.ERROR, self.committed + 1, self._failures.suspicion)
            self._failures.current.append(failure)
        members = self._crew.member_processes()
        parked = [entry for entry in members if entry.health is Health.PARKED]
        held = {e.name: {"step": e.step, "valid": e.valid, "pending": e.pending} for e in parked}
        self.hands.record(Kind.SURVIVORS_PARKED, processes=held)
        self._decide()

    def _decide(self) -> None:
        self._failures.forget_suspicion()
        loop = self._failures.loop(self.timing.max_deaths)
        if loop:
            self.stop("gave-up", loop)
            return
        if self._failures.may_try(self._progress.high_water, world=self.world):
            self._act(self.strategy.on_failure(self._view()))
            return
        tries, step = self._failures.attempts - 1, self._progress.high_water
        self.stop("gave-up", f"{tries} recoveries in a row brought no new step after {step}")

    # ---- decisions

    def _act(self, decision: Decision) -> None:
        self._again_s = decision.again_s if decision.again_s is not None else self._again_s
        carry_out(decision, self, self._crew, self.hands)

    def take(self, form: Form, new: Sequence[str]) -> None:
        """See recovery.supervise.execute.Stages."""
        self._skips.take(form)
        self._formation.want(form, new)
        self.stage = Stage.WAITING
        self._form_if_ready()

    def pause(self, *, save: bool) -> None:
        """See recovery.supervise.execute.Stages."""
        if self.stage is Stage.TRAINING and not any(
            m.finished for m in self._crew.member_processes()
        ):
            self.stage, self._pause_saves = Stage.PAUSING, save
        elif self.stage is not Stage.PAUSING:
            return
        self.hands.send(self.members[0], PauseRequest(save=save))

    # ---- the end

    def _end_if_finished(self) -> None:
        if self.stage not in (Stage.TRAINING, Stage.PAUSING):
            return
        if self._crew.all_finished:
            self._complete()

    def _complete(self) -> None:
        self._progress.reached(self.steps)
        self.outcome, self.reason = "completed", f"{self.steps} steps committed"
        self._end(kill=False)

    def _end(self, *, kill: bool) -> None:
        self.stage = Stage.ENDING
        self._deadline_s = self.hands.now_s() + self.timing.end_timeout_s
        self._crew.dismiss(kill=kill)
        self._finish_if_gone()

    def _finish_if_gone(self) -> None:
        if self._crew.all_dead:
            self.stage = Stage.DONE

    def _view(self) -> ClusterView:
        return ClusterView(
            now_s=self.hands.now_s(),
            generation=self.generation,
            world=self.world,
            spares=self.strategy.spares_wanted,
            members=self.members,
            processes=self._crew.views(),
            failures=self._skips.with_samples(self._failures.current),
            skipped=self._skips.lately,
            history=tuple(self._failures.history),
            rollbacks=self._formation.rollbacks,
            shards=self.shards,
            saved=self._digests.has_checkpoint,
            saved_step=self._digests.newest,
            pause_saves=self._pause_saves,
        )
