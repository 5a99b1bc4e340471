"""Supervises one job: hears of exits, messages and progress, asks the strategy, and has its decisions carried out.

A state machine driven from outside: time comes from ``Hands``, nothing here waits, sleeps or starts a process itself. The
same code supervises real processes and simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from chaos.events import Kind
from recovery.detect import HangDetector, HangLimits
from recovery.marks import Mark
from recovery.strategy import (
    Cause, ClusterView, Decision, Failure, Form, GiveUp, Health, Kill, Pause, ProcessView, Spawn, StateFrom, Strategy,
)  # fmt: skip
from recovery.wire import Abort, Finished, Join, Joined, Message, Parked, PauseRequest, Ready, Stop


class Hands(Protocol):
    """What the controller can do to the world. All calls return at once."""

    def now_s(self) -> float:
        """Monotonic seconds."""

    def spawn(self, role: str, mode: str) -> str:
        """Start a process; returns its name. Its exit or ``Ready`` is reported later."""

    def send(self, process: str, message: Message) -> bool:
        """Send to a process; False when it is gone."""

    def kill(self, process: str) -> None:
        """SIGKILL; the exit is reported later."""

    def mark(self, process: str) -> Mark:
        """The process's progress mark."""

    def os_state(self, process: str) -> str:
        """The kernel's word on the process: R, S, D, T, Z, X."""

    def record(self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any) -> None:
        """Write an event."""


class Stage(StrEnum):
    """Where the job is."""

    STARTING = "starting"
    FORMING = "forming"
    TRAINING = "training"
    STOPPING = "stopping"  # aborting a generation, waiting for its survivors to park
    PAUSING = "pausing"
    WAITING = "waiting"  # a generation is decided, its members are not all ready
    ENDING = "ending"
    DONE = "done"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Bounds of every wait, seconds. ``max_attempts``: decisions in a row without one new committed step."""

    start_timeout_s: float = 120.0
    join_timeout_s: float = 60.0
    park_timeout_s: float = 1.0
    blame_grace_s: float = 0.3
    max_attempts: int = 10
    hang: HangLimits = field(default_factory=HangLimits)


@dataclass(kw_only=True)
class _Process:
    name: str
    role: str
    health: Health = Health.STARTING
    rank: int | None = None
    step: int = 0
    valid: bool = False
    finished: bool = False
    expected_exit: bool = False
    deadline_s: float = 0.0


class Controller:
    """Supervises one job under one strategy. Call ``start`` once, then the ``on_*`` methods and ``tick`` as things happen."""

    def __init__(
        self, strategy: Strategy, hands: Hands, *, world: int, steps: int, store_port: int, timing: Timing | None = None,
        watch: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.strategy = strategy
        self.hands = hands
        self.world = world
        self.steps = steps
        self.store_port = store_port
        self.timing = timing or Timing()
        self.stage = Stage.STARTING
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.outcome = ""
        self.reason = ""
        self.committed = 0
        self.rollbacks = 0
        self.detector = HangDetector(limits=self.timing.hang)
        self._watch = watch or (lambda _: None)
        self._processes: dict[str, _Process] = {}
        self._failures: list[Failure] = []
        self._history: list[Failure] = []
        self._failure_count = 0
        self._pending_form: Form | None = None
        self._joined: dict[str, Joined] = {}
        self._deadline_s = 0.0
        self._suspicion_s: float | None = None
        self._suspicion = ""
        self._attempts = 0
        self._attempts_since = -1

    # ---- what others may ask

    @property
    def done(self) -> bool:
        """The job is over and every process gone."""
        return self.stage is Stage.DONE

    @property
    def live(self) -> tuple[str, ...]:
        """Names of processes not known to be dead."""
        return tuple(p.name for p in self._processes.values() if p.health is not Health.DEAD)

    @property
    def ready_spares(self) -> tuple[str, ...]:
        """Processes waiting outside the generation, oldest first."""
        return tuple(p.name for p in self._processes.values() if p.health is Health.READY)

    def process_of(self, rank: int) -> str | None:
        """The process that holds a rank now."""
        return self.members[rank] if rank < len(self.members) else None

    def exit_was_expected(self, process: str) -> bool:
        """Whether the controller asked for this process's end."""
        return process in self._processes and self._processes[process].expected_exit

    # ---- inputs

    def start(self) -> None:
        """Start the first processes."""
        for _ in range(self.world):
            self._spawn("worker", self.strategy.start_mode)
        for _ in range(self.strategy.spares_wanted):
            self._spawn("spare", "warm")
        first = tuple(name for name, p in self._processes.items() if p.role == "worker")
        self._pending_form = Form(members=first, state=StateFrom.INITIAL, cause="start")

    def stop(self, outcome: str, reason: str) -> None:
        """End the job early; every process is killed."""
        if self.stage in (Stage.ENDING, Stage.DONE):
            return
        self.outcome, self.reason = outcome, reason
        self._end(kill=True)

    def on_message(self, process: str, message: object) -> None:
        """A process sent something."""
        entry = self._processes[process]
        if entry.health is Health.DEAD or self.stage is Stage.DONE:
            return
        match message:
            case Ready():
                self._on_ready(entry)
            case Joined():
                self._on_joined(entry, message)
            case Parked():
                self._on_parked(entry, message)
            case Finished():
                self._on_finished(entry, message)

    def on_exit(self, process: str, how: str) -> None:
        """A process is gone. ``how``: for people, such as ``signal 9``."""
        entry = self._processes[process]
        if entry.health is Health.DEAD:
            return
        expected = entry.expected_exit
        entry.health = Health.DEAD
        if self.stage is Stage.ENDING:
            self._finish_if_gone()
        elif not expected:
            self._fail(entry, Cause.EXIT, how)
        elif self.stage is Stage.STOPPING:
            self._decide_if_parked()

    def tick(self) -> None:
        """Look at clocks and marks; call every few milliseconds to tens of milliseconds."""
        now = self.hands.now_s()
        if self.stage in (Stage.TRAINING, Stage.PAUSING):
            self._look_at_marks(now)
        elif self.stage is Stage.STOPPING and now > self._deadline_s:
            self._declare_unparked()
        elif self.stage is Stage.FORMING and now > self._deadline_s:
            self._suspect("the group did not form in time")
        if self.stage in (Stage.STARTING, Stage.WAITING, Stage.TRAINING):
            self._look_at_starters(now)
        if self.stage is Stage.ENDING and now > self._deadline_s:
            for entry in self._alive():
                self._kill(entry)

    # ---- readiness and forming

    def _on_ready(self, entry: _Process) -> None:
        entry.health = Health.READY
        self.hands.record(Kind.PROCESS_READY, process=entry.name)
        if self.stage in (Stage.STARTING, Stage.WAITING):
            self._form_if_ready()
        elif self.stage is Stage.TRAINING:
            self._act(self.strategy.on_ready(self._view()))

    def _form_if_ready(self) -> None:
        form = self._pending_form
        if form is None:
            return
        able = (Health.READY, Health.PARKED)
        wanted = [self._processes[name] for name in form.members]
        if self.stage is Stage.STARTING:
            wanted = list(self._processes.values())  # spares too: a job starts with what it was promised
        if all(entry.health in able for entry in wanted):
            self._form(form)

    def _form(self, form: Form) -> None:
        self._pending_form = None
        self.generation += 1
        self.members = form.members
        self._joined = {}
        for entry in list(self._alive()):
            if entry.health is Health.PARKED and entry.name not in form.members:
                self._kill(entry)  # fenced: it left the job and must not write to it again
        source, receivers = self._plan_transfer(form)
        if form.state is StateFrom.CHECKPOINT:
            self.rollbacks += 1
        self.stage = Stage.FORMING
        self._deadline_s = self.hands.now_s() + self.timing.join_timeout_s
        self.hands.record(
            Kind.GENERATION_STARTED, generation=self.generation, members=list(form.members), state=form.state.value,
            source=None if source is None else form.members[source], cause=form.cause,
        )  # fmt: skip
        self._watch(f"generation {self.generation}")
        for rank, name in enumerate(form.members):
            entry = self._processes[name]
            entry.rank, entry.health, entry.finished = rank, Health.TRAINING, False
            join = Join(
                generation=self.generation, rank=rank, members=list(form.members), store_port=self.store_port,
                source=source, receivers=receivers, restore=form.state is StateFrom.CHECKPOINT,
                timeout_s=self.timing.join_timeout_s,
            )  # fmt: skip
            self.hands.send(name, join)

    def _plan_transfer(self, form: Form) -> tuple[int | None, list[int]]:
        """Source rank and receiving ranks of the new generation's state."""
        if form.state is StateFrom.INITIAL:
            return None, []
        if form.state is StateFrom.CHECKPOINT:
            return 0, list(range(1, len(form.members)))
        entries = [self._processes[name] for name in form.members]
        whole = [e.health is Health.PARKED and e.valid and e.name not in form.refill for e in entries]
        newest = max(e.step for e, ok in zip(entries, whole, strict=True) if ok)
        current = [ok and e.step == newest for e, ok in zip(entries, whole, strict=True)]
        receivers = [rank for rank, ok in enumerate(current) if not ok]
        return current.index(True), receivers

    def _on_joined(self, entry: _Process, message: Joined) -> None:
        if self.stage is not Stage.FORMING or message.generation != self.generation:
            return
        entry.step, entry.valid = message.step, True
        self._joined[entry.name] = message
        if len(self._joined) < len(self.members):
            return
        names = [m.checkpoint for m in self._joined.values() if m.checkpoint]
        self.hands.record(
            Kind.GENERATION_READY, step=message.step, generation=self.generation, members=list(self.members),
            resume_step=message.step, checkpoint=names[0] if names else None,
        )  # fmt: skip
        self._history.extend(self._failures)
        self._failures = []
        self._suspicion_s = None
        self.stage = Stage.TRAINING
        self.detector.resumed(self.hands.now_s())
        if self.ready_spares and len(self.members) < self.world:
            self._act(self.strategy.on_ready(self._view()))
        self._end_if_finished()

    # ---- failures

    def _fail(self, entry: _Process, cause: Cause, detail: str) -> None:
        now = self.hands.now_s()
        failure = Failure(process=entry.name, rank=entry.rank, cause=cause, step=self._step_of(entry), time_s=now)
        self._declare(failure, detail)
        if entry.health is not Health.DEAD and cause in (Cause.HANG, Cause.START_TIMEOUT):
            self._kill(entry)
            entry.health = Health.DEAD  # a hung process may take a while to die; nobody waits for it
        member = entry.name in self.members
        awaited = self._pending_form is not None and entry.name in self._pending_form.members
        if self.stage is Stage.STOPPING:
            if member:
                self._failures.append(failure)
            self._decide_if_parked()
        elif self.stage is Stage.STARTING:
            self.outcome, self.reason = "broken", f"{entry.name} failed before training began: {detail}"
            self._end(kill=True)
        elif self.stage is Stage.WAITING and awaited:
            self._failures.append(failure)
            self._pending_form = None
            self._decide()
        elif member:
            self._failures.append(failure)
            self._stop_generation()
        elif self.stage is Stage.TRAINING:
            self._act(self.strategy.on_spare_lost(self._view()))

    def _declare(self, failure: Failure, detail: str) -> None:
        self._failure_count += 1
        self.hands.record(
            Kind.FAILURE_DETECTED, step=failure.step, generation=self.generation, failure=self._failure_count,
            cause=failure.cause.value, process=failure.process or None, rank=failure.rank, detail=detail,
        )  # fmt: skip
        self._watch(f"failure {failure.cause.value} {failure.process}")

    def _stop_generation(self) -> None:
        """Have every survivor leave the generation at once: a cascade from neighbour to neighbour is not enough."""
        self.stage = Stage.STOPPING
        self._suspicion_s = None
        self._deadline_s = self.hands.now_s() + self.timing.park_timeout_s
        if not self.strategy.keeps_survivors:
            self._decide()
            return
        told = [e.name for e in self._alive() if e.name in self.members and e.health is Health.TRAINING]
        for name in told:
            self.hands.send(name, Abort(generation=self.generation))
        self.hands.record(Kind.ABORT_SENT, processes=told)
        self._decide_if_parked()

    def _on_parked(self, entry: _Process, message: Parked) -> None:
        if message.generation != self.generation or entry.name not in self.members:
            return
        entry.health, entry.step, entry.valid = Health.PARKED, message.step, message.valid
        entry.finished = False
        if message.why == "nonfinite" and self.stage in (Stage.TRAINING, Stage.PAUSING):
            self._on_nonfinite(message)
        elif self.stage is Stage.STOPPING:
            self._decide_if_parked()
        elif message.why == "pause" and self.stage is Stage.PAUSING:
            if all(self._processes[name].health is Health.PARKED for name in self.members):
                self._act(self.strategy.on_paused(self._view()))
        elif message.why != "pause":
            self._suspect(message.error)

    def _on_nonfinite(self, message: Parked) -> None:
        blamed = [self.members[rank] for rank in message.blamed if rank < len(self.members)]
        for name in blamed or [""]:
            rank = self.members.index(name) if name else None
            failure = Failure(
                process=name, rank=rank, cause=Cause.NONFINITE, step=message.step + 1, time_s=self.hands.now_s()
            )  # fmt: skip
            self._declare(failure, "non-finite loss or gradient, refused before the optimizer step")
            self._failures.append(failure)
        # All ranks see the same reduced flags, so all park by themselves; the abort is for one that cannot.
        self._stop_generation()

    def _suspect(self, why: str) -> None:
        """Somebody's collective failed and nobody is known to be dead: break the group, and wait a moment for the cause."""
        if self._suspicion_s is None and self.stage in (Stage.TRAINING, Stage.PAUSING, Stage.FORMING):
            self._suspicion = why
            self._stop_generation_for_suspicion()

    def _stop_generation_for_suspicion(self) -> None:
        now = self.hands.now_s()
        self.stage = Stage.STOPPING
        self._suspicion_s = now
        self._deadline_s = now + self.timing.park_timeout_s
        told = [e.name for e in self._alive() if e.name in self.members and e.health is Health.TRAINING]
        for name in told:
            self.hands.send(name, Abort(generation=self.generation))
        self.hands.record(Kind.ABORT_SENT, processes=told)

    def _declare_unparked(self) -> None:
        """Survivors that did not park in time hang; with all parked and nobody dead, the connection itself failed."""
        late = [e for e in self._alive() if e.name in self.members and e.health is Health.TRAINING]
        now = self.hands.now_s()
        starved = [e for e in late if self.hands.os_state(e.name) in "RD"]
        if starved and now < self._deadline_s + self.timing.park_timeout_s * self.timing.hang.starved_factor:
            return
        for entry in late:
            self._fail(entry, Cause.HANG, "did not leave an aborted generation")
        if not late and not self._failures:
            self._decide_if_parked()

    def _decide_if_parked(self) -> None:
        if self.stage is not Stage.STOPPING:
            return
        members = [self._processes[name] for name in self.members]
        if any(entry.health is Health.TRAINING for entry in members):
            return
        if not self._failures:
            if self._suspicion_s is None:
                return
            if self.hands.now_s() < self._suspicion_s + self.timing.blame_grace_s:
                # The cause may be a death not reported yet.
                self._deadline_s = self._suspicion_s + self.timing.blame_grace_s
                return
            failure = Failure(
                process="", rank=None, cause=Cause.ERROR, step=self.committed + 1, time_s=self.hands.now_s()
            )
            self._declare(failure, self._suspicion)
            self._failures.append(failure)
        parked = [entry for entry in members if entry.health is Health.PARKED]
        self.hands.record(
            Kind.SURVIVORS_PARKED, processes={e.name: {"step": e.step, "valid": e.valid} for e in parked}
        )
        self._decide()

    def _decide(self) -> None:
        self._suspicion_s = None
        self._attempts = self._attempts + 1 if self._attempts_since == self.committed else 1
        self._attempts_since = self.committed
        if self._attempts > self.timing.max_attempts:
            self.outcome = "gave-up"
            self.reason = f"{self.timing.max_attempts} recoveries in a row brought no new step after {self.committed}"
            self._end(kill=True)
            return
        self._act(self.strategy.on_failure(self._view()))

    # ---- decisions

    def _act(self, decision: Decision) -> None:
        if not decision.actions:
            return
        self.hands.record(
            Kind.DECISION, actions=[_describe(action) for action in decision.actions], reason=decision.reason
        )  # fmt: skip
        self._watch(f"decision {decision.reason}")
        new: list[str] = []
        form: Form | None = None
        for action in decision.actions:
            match action:
                case Kill():
                    self._kill(self._processes[action.process])
                case Spawn():
                    new.append(self._spawn(action.role, action.mode))
                case Pause():
                    self._pause()
                case Form():
                    form = action
                    if not any(name.startswith("new-") for name in form.members):
                        # Nobody to wait for: the group forms before replacements cost any time.
                        self._take(form, new)
                        form = None
                case GiveUp():
                    self.outcome, self.reason = "gave-up", decision.reason
                    self._end(kill=True)
                    return
        if form is not None:
            self._take(form, new)

    def _take(self, form: Form, new: list[str]) -> None:
        names = tuple(new[int(name[4:])] if name.startswith("new-") else name for name in form.members)
        self._pending_form = replace(form, members=names)
        self.stage = Stage.WAITING
        self._form_if_ready()

    def _pause(self) -> None:
        if self.stage is Stage.TRAINING and not any(self._processes[n].finished for n in self.members):
            self.stage = Stage.PAUSING
            self.hands.send(self.members[0], PauseRequest())

    # ---- progress

    def _look_at_marks(self, now: float) -> None:
        marks = {name: self.hands.mark(name) for name in self.members if not self._processes[name].finished}
        marks = {name: mark for name, mark in marks.items() if mark.generation == self.generation}
        if not marks:
            return
        committed = min(mark.committed for mark in marks.values())
        self.committed = max(self.committed, committed)
        self.detector.observe(now, committed)
        silent = {name: self.hands.os_state(name) in "RD" for name, m in marks.items() if now - m.time_ns / 1e9 > 0.25}
        hangs = self.detector.check(now, marks, silent)
        if hangs:
            hang = hangs[0]
            detail = f"silent for {hang.silent_s:.2f} s in {hang.phase} of step {hang.step}, limit {hang.deadline_s:.2f} s"
            self._fail(self._processes[hang.process], Cause.HANG, detail)
        elif self.detector.stuck(now, marks):
            self._suspect("all ranks wait in one collective")

    def _look_at_starters(self, now: float) -> None:
        for entry in list(self._processes.values()):
            if entry.health is Health.STARTING and now > entry.deadline_s:
                self._fail(entry, Cause.START_TIMEOUT, f"not ready after {self.timing.start_timeout_s:.0f} s")

    def _on_finished(self, entry: _Process, message: Finished) -> None:
        entry.finished, entry.step, entry.valid = True, message.step, True
        self._end_if_finished()

    def _end_if_finished(self) -> None:
        if self.stage not in (Stage.TRAINING, Stage.PAUSING):
            return
        if all(self._processes[name].finished for name in self.members):
            self.committed = self.steps
            self.outcome, self.reason = "completed", f"{self.steps} steps committed"
            self._end(kill=False)

    def _end(self, *, kill: bool) -> None:
        self.stage = Stage.ENDING
        self._deadline_s = self.hands.now_s() + 5.0
        for entry in list(self._alive()):
            # Whoever is still starting has nothing to close.
            if kill or entry.health is Health.STARTING:
                self._kill(entry)
            else:
                entry.expected_exit = True
                self.hands.send(entry.name, Stop())
        self._finish_if_gone()

    def _finish_if_gone(self) -> None:
        if not any(True for _ in self._alive()):
            self.stage = Stage.DONE

    # ---- small helpers

    def _alive(self) -> list[_Process]:
        return [entry for entry in self._processes.values() if entry.health is not Health.DEAD]

    def _spawn(self, role: str, mode: str) -> str:
        name = self.hands.spawn(role, mode)
        deadline = self.hands.now_s() + self.timing.start_timeout_s
        self._processes[name] = _Process(name=name, role=role, deadline_s=deadline)
        return name

    def _kill(self, entry: _Process) -> None:
        entry.expected_exit = True
        if entry.health is Health.DEAD:
            return
        if self.stage is not Stage.ENDING:
            entry.health = Health.DEAD
        self.hands.kill(entry.name)

    def _step_of(self, entry: _Process) -> int:
        mark = self.hands.mark(entry.name)
        return max(mark.step, mark.committed)

    def _view(self) -> ClusterView:
        views = tuple(
            ProcessView(
                name=e.name, role=e.role, health=e.health, step=e.step, valid=e.valid,
                rank=self.members.index(e.name) if e.name in self.members else None,
            )  # fmt: skip
            for e in self._processes.values()
        )
        return ClusterView(
            now_s=self.hands.now_s(), generation=self.generation, world=self.world, spares=self.strategy.spares_wanted,
            members=self.members, processes=views, failures=tuple(self._failures), history=tuple(self._history),
            rollbacks=self.rollbacks,
        )  # fmt: skip


def _describe(action: object) -> str:
    match action:
        case Kill():
            return f"kill {action.process}"
        case Spawn():
            return f"spawn {action.mode} {action.role}"
        case Form():
            refill = f", refilling {' '.join(action.refill)}" if action.refill else ""
            return f"form {' '.join(action.members)} with state from {action.state.value}{refill}"
        case Pause():
            return "pause after the next commit"
        case _:
            return "give up"
