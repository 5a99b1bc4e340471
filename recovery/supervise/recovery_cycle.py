"""What follows a failure, from top to bottom: abort the generation, decide, form the next one,
train on. Failures are detected in ``recovery.supervise.controller``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from trainchaos.chaos.errors import NoPlaceLeft
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.costs import Tried
from trainchaos.recovery.policy.fallback import wrong_values
from trainchaos.recovery.policy.strategy import (
    Action,
    Cause,
    ClusterView,
    Decision,
    Form,
    GiveUp,
    Health,
    Kill,
    Pause,
    Spawn,
    Strategy,
    describe,
)
from trainchaos.recovery.spares.standing import SETTLE_SILENCE_S
from trainchaos.recovery.supervise.divergence import Disagreement
from trainchaos.recovery.supervise.failures import Symptom
from trainchaos.recovery.supervise.job_state import JobState
from trainchaos.recovery.supervise.process_table import Process
from trainchaos.recovery.supervise.supervision import Stage
from trainchaos.recovery.transport.wire import Joined, Parked, PauseRequest


class ReplacementDelay:
    """Reports once for each generation that it has made a step, or has had ``limit_s`` seconds for
    it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._step, self._since_s = 0, 0.0
        self._settled = False

    def began(self, step: int, now_s: float) -> None:
        """A generation trains from this step on."""
        self._step, self._since_s, self._settled = step, now_s, False

    def just_settled(self, committed: int, now_s: float) -> bool:
        """True once per generation: lost or used processes can be replaced now."""
        if self._settled or (committed <= self._step and now_s <= self._since_s + self._limit_s):
            return False
        self._settled = True
        return True


_TRAINS = (Stage.TRAINING, Stage.PAUSING)


def _starts(actions: Sequence[Action]) -> tuple[str, str, int]:
    """Role and mode of the first of these, and how many such starts follow one another."""
    first = actions[0]
    assert isinstance(first, Spawn)
    alike = itertools.takewhile(lambda action: action == first, actions)
    return first.role, first.mode, len(list(alike))


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


class RecoveryCycle:
    """Moves a job from stage to stage. ``outcome``, ``reason``: of the job, once it ends;
    ``parking``: the wait for survivors.
    """

    def __init__(self, job: JobState, strategy: Strategy) -> None:
        self._job = job
        self._strategy = strategy
        self.parking = Parking(job)
        self._delay = ReplacementDelay(job.timing.settle_timeout_s)
        self._again_s = math.inf
        self._no_place_until_s = -math.inf
        self._tried: list[Tried] = []  # since step ``_tried_at`` was the newest
        self._tried_at = 0
        self._pause_saves = False
        self._warned: set[str] = set()  # members of whom the strategy knows
        self._end_by_s = 0.0
        self.stage = Stage.STARTING
        self.outcome = ""
        self.reason = ""

    # ---- a failure

    def failed(self, process: Process, *, has_place: bool) -> None:
        """A process has failed, and the failure is recorded. ``has_place``: the generation lacks
        this process.
        """
        match self.stage:
            case Stage.STOPPING:
                self.decide_if_parked()
            case Stage.WAITING if self._job.formation.awaits(process.name):
                self._job.formation.drop()
                self._decide()
            case Stage.WAITING:
                pass
            case _ if has_place:
                self.stop_generation()
            case Stage.TRAINING:
                self._act(self._strategy.on_spare_lost(self._view()))

    def noticed(self, process: Process, *, has_place: bool) -> None:
        """A process will be ended soon; the strategy decides whether a member leaves early."""
        answer = self._strategy.on_notice if has_place else self._strategy.on_spare_lost
        match self.stage:
            case Stage.STARTING | Stage.WAITING:
                self.form_if_ready()  # it may be the last one that the generation waited for
            case Stage.TRAINING:
                self._act(answer(self._view()))
            case Stage.PAUSING if process.name in self._job.members:
                # Once this process is gone too, state that was to pass to other processes may have
                # to be saved.
                more = answer(self._view())
                if Pause(save=True) in more.actions:
                    self._act(more)

    def warned(self, *, member: bool) -> None:
        """The places of processes, of a ``member`` among them, are about to fail; the strategy
        decides whether members move. Outside of training, that is decided as soon as the next
        generation trains.
        """
        match self.stage:
            case Stage.STARTING | Stage.WAITING:
                self.form_if_ready()  # it may be the last one that the generation waited for
            case Stage.TRAINING if member:
                self._answer_warnings()
            case Stage.TRAINING:
                self._act(self._strategy.on_spare_lost(self._view()))

    def _answer_warnings(self) -> None:
        """Have the strategy decide about each warned member once, while the job trains."""
        if self.stage is not Stage.TRAINING:
            return
        warned = {p.name for p in self._job.table.member_processes() if p.warned}
        new, self._warned = warned - self._warned, warned
        if new:
            self._act(self._strategy.on_warning(self._view()))

    def _leave_training(self) -> None:
        """The generation is to stop. What it was to do at the pause it was asked for is not done,
        so that the strategy is asked again.
        """
        if self.stage is Stage.PAUSING:
            self._warned = set()
        self.stage = Stage.STOPPING

    def differ(self, found: Disagreement) -> None:
        """States of replicas differ: the generation must not go on."""
        self._job.differ(found)
        if self.stage is not Stage.STOPPING:
            self.stop_generation()

    def _refused(self, message: Parked) -> None:
        """A rank has refused values that are not finite."""
        job, timing = self._job, self._job.timing
        # the blamed ranks look for the sample, and then park
        examined = job.excluded.examine == message.step + 1
        job.refused(message)
        if message.step >= job.steps and self.stage is Stage.STOPPING:
            self.decide_if_parked()
        elif message.step >= job.steps or not (self._strategy.keeps_survivors or examined):
            self.stop_generation()
        else:
            # All ranks see the same flags and park by themselves; an abort now could cut one off.
            self._leave_training()
            self.parking.let_park(timing.examine_timeout_s if examined else timing.unforced_park_s)
            self.decide_if_parked()

    def suspect(self, why: str) -> None:
        """A collective failed and no process is known to be dead: break the group and wait for the
        cause.
        """
        if self.stage in (*_TRAINS, Stage.FORMING):
            self._job.failures.suspect(why)
            self._leave_training()
            self.parking.abort()

    # ---- abort

    def stop_generation(self) -> None:
        """Have every survivor leave the generation at once, or replace all where the strategy keeps
        no survivor.
        """
        self._leave_training()
        self._job.failures.forget_suspicion()
        if not self._strategy.keeps_survivors:
            self._decide()
            return
        self.parking.abort()
        self.decide_if_parked()

    def parked(self, process: Process, message: Parked) -> None:
        """A rank has left its generation, because of an abort, a failure it saw, or a pause."""
        if not self._job.parked(process, message):
            return
        # ranks park one by one
        late = self.stage is Stage.STOPPING and message.step >= self._job.steps
        if message.why == "nonfinite" and (late or self.stage in _TRAINS):
            self._refused(message)
        elif self.stage is Stage.STOPPING:
            self.decide_if_parked()
        elif message.why != "pause":
            self.suspect(message.error)
        elif self.stage is Stage.PAUSING and self._job.table.all_parked:
            self._act(self._strategy.on_paused(self._view()))

    # ---- decide

    def decide_if_parked(self) -> None:
        """Decide, once all survivors have left and the cause is known."""
        if self.stage is Stage.STOPPING and self.parking.conclude():
            self._decide()

    def _decide(self) -> None:
        self._job.failures.forget_suspicion()
        if why := self._job.why_give_up():
            self.stop("gave-up", why)
            return
        self._job.meter.failed()
        decision = self._strategy.on_failure(self._view())
        if decision.chosen:
            current = self._job.failures.current
            places = frozenset((failure.rank, failure.cause.value) for failure in current)
            self._tried.append(Tried(option=decision.chosen, places=places))
        self._act(decision)

    def _view(self) -> ClusterView:
        newest = self._job.progress.high_water
        if newest > self._tried_at:
            self._tried, self._tried_at = [], newest
        return self._job.view(
            spares=self._strategy.spares_wanted,
            pause_saves=self._pause_saves,
            tried=tuple(self._tried),
            no_place=self._job.hands.now_s() < self._no_place_until_s,
        )

    def _act(self, decision: Decision) -> None:
        """Record the decision, if it changes anything, and carry it out."""
        self._again_s = decision.again_s if decision.again_s is not None else self._again_s
        if not decision.actions:
            return
        actions = [describe(action) for action in decision.actions]
        weighed: dict[str, Any] = {}
        if decision.options:
            options = [option.fields() for option in decision.options]
            weighed = {"options": options, "chosen": decision.chosen}
        self._job.hands.record(Kind.DECISION, actions=actions, reason=decision.reason, **weighed)
        try:
            self._carry_out(decision)
        except NoPlaceLeft as error:
            self._no_place(decision, error.message)

    def _no_place(self, decision: Decision, why: str) -> None:
        """A process cannot be started. A job that has members of the next generation to wait for
        ends, unless its strategy, which is asked once more, knows an answer that starts nobody.
        """
        now_s = self._job.hands.now_s()
        self._again_s = self._no_place_until_s = now_s + self._job.timing.settle_timeout_s
        if not decision.starts_members:  # of a spare: the job goes on without it
            return
        other = self._strategy.on_failure(self._view())
        if other.starts_members or not other.actions:
            self.stop("gave-up", why)
        else:
            self._act(other)

    def _carry_out(self, decision: Decision) -> None:
        table = self._job.table
        new: list[str] = []
        form: Form | None = None
        for name in wrong_values(decision, self._job.failures.current):
            self._job.hands.distrust(name)
        for place, action in enumerate(decision.actions):
            match action:
                case Kill():
                    table.kill(table[action.process])
                case Spawn():
                    if place == 0 or decision.actions[place - 1] != action:
                        self._job.hands.expect(*_starts(decision.actions[place:]))
                    new.append(table.spawn(action.role, action.mode))
                case Pause():
                    self._pause(save=action.save)
                case Form():
                    form = action
                    if not decision.starts_members:
                        # When no process is awaited, the group forms before replacements cost any
                        # time.
                        self._take(form, new)
                        form = None
                case GiveUp():
                    self.stop("gave-up", decision.reason)
                    return
        if form is not None:
            self._take(form, new)

    def _take(self, form: Form, new: Sequence[str]) -> None:
        """Form this generation next, as soon as its members are ready; ``new``: the processes that
        stand behind ``new-0``, ``new-1`` ...
        """
        self._job.excluded.take(form)
        self._job.formation.want(form, new)
        self.stage = Stage.WAITING
        self.form_if_ready()

    def _pause(self, *, save: bool) -> None:
        """Have the generation park at the next step boundary."""
        members = self._job.table.member_processes()
        if self.stage is Stage.TRAINING and not any(member.finished for member in members):
            self.stage, self._pause_saves = Stage.PAUSING, save
        elif self.stage is not Stage.PAUSING:
            return
        self._job.hands.send(self._job.members[0], PauseRequest(save=save))

    # ---- form

    def became_ready(self, process: Process) -> None:
        """A process is built and waits for orders, or holds the part that it was to follow."""
        self._job.excluded.send_missing(process)  # before it is needed
        if self.stage in (Stage.STARTING, Stage.WAITING):
            self.form_if_ready()
        elif self.stage is Stage.TRAINING:
            self._job.feed_spares()
            self._act(self._strategy.on_ready(self._view()))
            if self.stage is Stage.TRAINING:
                self._job.stand_by(self._strategy, self._view)

    def form_if_ready(self) -> None:
        """Begin the decided generation, if all its members are ready."""
        if self._job.formation.can_begin(with_spares=self.stage is Stage.STARTING):
            self.stage = Stage.FORMING
            self._job.form(self._strategy)

    def joined(self, process: Process, message: Joined) -> None:
        """A member holds the generation's state. Once all members do, they train."""
        job = self._job
        held = job.formation.joined(process, message) if self.stage is Stage.FORMING else None
        if held is None:
            return
        if found := job.digests.joined(held):  # they must not train
            self.differ(found)
            return
        job.trains(message.step)
        self._delay.began(message.step, job.hands.now_s())
        self.stage = Stage.TRAINING
        self.go_on()

    # ---- train on

    def go_on(self) -> None:
        """The generation trains."""
        self._job.feed_spares()
        # notices that members got before it formed, or while they had no supervisor
        if any(member.noticed for member in self._job.table.member_processes()):
            self._act(self._strategy.on_notice(self._view()))
        self._answer_warnings()
        self.end_if_finished()

    def replace_lost(self, now_s: float, committed: int) -> None:
        """Replace lost or used processes, once the generation has made a step. ``committed``: the
        newest that all members have.
        """
        job = self._job
        if self.stage is not Stage.TRAINING:
            return
        settled = self._delay.just_settled(committed, now_s)
        if settled or now_s >= self._again_s:
            self._again_s = math.inf
            self._act(self._strategy.on_spare_lost(self._view()))
        if settled and job.ready_spares and len(job.members) < job.world:
            self._act(self._strategy.on_ready(self._view()))
        if settled and self.stage is Stage.TRAINING:
            self._job.stand_by(self._strategy, self._view)

    # ---- end

    def end_if_finished(self) -> None:
        """End the job, if every member has finished its last step."""
        if self.stage in _TRAINS and self._job.table.all_finished:
            self.complete()

    def complete(self) -> None:
        """End the job: every step is committed."""
        self._job.progress.reached(self._job.steps)
        self._end("completed", f"{self._job.steps} steps committed", kill=False)

    def stop(self, outcome: str, reason: str) -> None:
        """End the job early; every process is killed."""
        if self.stage not in (Stage.ENDING, Stage.DONE):
            self._end(outcome, reason, kill=True)

    def _end(self, outcome: str, reason: str, *, kill: bool) -> None:
        self.outcome, self.reason, self.stage = outcome, reason, Stage.ENDING
        self._end_by_s = self._job.hands.now_s() + self._job.timing.end_timeout_s
        self._job.table.dismiss(kill=kill)
        self.end_if_gone()

    def end_if_gone(self) -> None:
        """The job is over when every process has exited, and what is seen of a stopped one from
        outside is written down.
        """
        if self._job.table.all_dead and not self._job.progress.evidence.awaited:
            self.stage = Stage.DONE

    def end_by_force(self, now_s: float) -> None:
        """While the job ends: kill a process that does not end by itself, and give up on one that
        survives SIGKILL.
        """
        if now_s > self._end_by_s + self._job.timing.kill_timeout_s:
            self.stage = Stage.DONE  # the launcher reports what is left
        elif now_s > self._end_by_s:
            self._job.table.dismiss(kill=True)
        else:
            self.end_if_gone()
