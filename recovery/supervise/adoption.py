"""A supervisor that takes over a job from one that is gone, by the job's log and by asking the
ranks.

The log says who was started, who ended, which generation there is and what failed; only the ranks
know where they are now. If all of them train, they train on undisturbed. Otherwise the generation
is broken and the strategy decides anew: whatever the lost supervisor had decided, but not written
down, is forgotten.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from chaos.events.log import Event, Kind
from recovery.checkpoint.memory import ROLE as KEEPER
from recovery.policy.doubts import Doubt
from recovery.policy.strategy import (
    Cause,
    ClusterView,
    Decision,
    Failure,
    Form,
    Health,
    StateFrom,
    Strategy,
)
from recovery.supervise.divergence import DigestBook, Disagreement
from recovery.supervise.excluded_samples import Skips
from recovery.supervise.failures import FailureBook, answer_of
from recovery.supervise.process_table import Process
from recovery.supervise.standing import Standing
from recovery.supervise.supervision import Hands, Stage, Timing
from recovery.transport.wire import Inquiry, Status

_ENDED_BY_US = (Cause.HANG, Cause.START_TIMEOUT, Cause.UNFIT)
LOST = "the coordinator was lost in the middle of a recovery"


@dataclass(kw_only=True)
class Past:
    """What a log says of a job. ``dead``: exited, or killed by the lost supervisor; ``condemned``:
    of them those it may not have come to kill; ``leaving``: those that were asked to end and have
    not; ``ready_generation``: the last that trained; ``failures``: not answered by it;
    ``unnoticed``: exits that no failure was declared for, and how; ``skipped``: samples and the
    first step without them; ``shard``: the part of the model that each process that was ever a
    member holds; ``agreed``, ``saved``: the last step at which the replicas were the same, and the
    checkpoint that vouches for; ``doubts``: which checkpoints are in doubt and not known to be out
    of the way.
    """

    roles: dict[str, str] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    members: tuple[str, ...] = ()
    generation: int = 0
    ready_generation: int = 0
    resume_step: int = 0
    rollbacks: int = 0
    failures: list[Failure] = field(default_factory=list)
    answered: list[Failure] = field(default_factory=list)
    skipped: dict[int, int] = field(default_factory=dict)
    unnoticed: dict[str, str] = field(default_factory=dict)
    shard: dict[str, int] = field(default_factory=dict)
    agreed: int | None = None
    saved: int | None = None
    doubts: tuple[Doubt, ...] = ()


def past(events: Sequence[Event], asked: Collection[str] = ()) -> Past:
    """Read a supervisor's log. Pure. ``asked``: processes that were sent their end, whether they
    are gone or not.

    Keepers of checkpoints are no part of it: whoever starts them follows them, supervisor or not.
    """
    found, answer, afresh = Past(dead=set(asked), leaving=set(asked)), "", False
    for event in events:
        data = event.data
        match event.kind:
            case Kind.PROCESS_SPAWNED if data["role"] != KEEPER:
                found.roles[data["process"]] = data["role"]
            case Kind.PROCESS_READY:
                found.ready.add(data["process"])
            case Kind.PROCESS_EXITED if data["process"] in found.roles:
                found.condemned.discard(data["process"])
                found.leaving.discard(data["process"])
                found.dead |= {data["process"]} if data["expected"] else set()
                if data["process"] not in found.dead and not data["expected"]:
                    how = data["signal"], data["exit_code"]
                    found.unnoticed[data["process"]] = (
                        f"exit code {how[1]}" if how[0] is None else f"signal {how[0]}"
                    )
            case Kind.FAILURE_DETECTED:
                failure = Failure(
                    process=data["process"] or "",
                    rank=data["rank"],
                    cause=Cause(data["cause"]),
                    step=event.step or 0,
                    time_s=event.time_ns / 1e9,
                    generation=event.generation,
                )
                found.failures.append(failure)
                died = failure.cause in (Cause.EXIT, *_ENDED_BY_US)
                found.dead |= {failure.process} if died else set()
                found.condemned |= {failure.process} if failure.cause in _ENDED_BY_US else set()
                found.unnoticed.pop(failure.process, None)
            case Kind.GENERATION_STARTED:
                found.members, found.generation = tuple(data["members"]), event.generation
                found.doubts = _doubts_of(data.get("doubts", ()))
                answer = answer_of(StateFrom(data["state"]), data["cause"])
                found.rollbacks += data["state"] == StateFrom.CHECKPOINT.value
                afresh = data["state"] != StateFrom.PEER.value
                found.shard |= {
                    name: rank % data["shards"] for rank, name in enumerate(data["members"])
                }
            case Kind.GENERATION_READY:
                found.ready_generation, found.resume_step = event.generation, data["resume_step"]
                found.answered += (replace(failure, answer=answer) for failure in found.failures)
                found.failures = []
                if afresh:
                    found.agreed = data["resume_step"]
                    found.saved = found.agreed if data["checkpoint"] else None
            case Kind.REPLICAS_AGREED:
                found.agreed, found.saved = event.step, data["saved"]
            case Kind.DOUBTS_SETTLED:
                found.doubts = _doubts_of(data["left"])
            case Kind.SAMPLES_SKIPPED:
                found.skipped |= dict.fromkeys(data["samples"], data["since"])
    return found


def _doubts_of(told: Sequence[Sequence[int]]) -> tuple[Doubt, ...]:
    return tuple((before, step) for before, step in told)


class Adopter(Standing):
    """The part of a controller that takes a job over."""

    strategy: Strategy
    hands: Hands
    timing: Timing
    _failures: FailureBook
    _skips: Skips
    _deadline_s: float
    _past: Past
    _first_state: StateFrom
    _unheard: set[str]
    _agreement: tuple[int | None, int | None]
    _inquiry: int = -1
    _differed: Disagreement | None = None

    def adopt(self, known: Past, state: StateFrom) -> None:
        """Take over, instead of ``start``: ask every process where it is, and go on once all have
        answered. ``state``: what ``start`` was, or would have been, told.
        """
        self._past, self._first_state = known, state
        self.stage = Stage.ADOPTING
        ranks = {name: rank for rank, name in enumerate(known.members)}
        for name, role in known.roles.items():
            entry = self._crew.know(name, role)
            entry.rank = ranks.get(name)
            entry.shard = known.shard.get(name)
            if name in known.dead:
                entry.health, entry.expected_exit = Health.DEAD, True
                entry.leaving = name in known.leaving
            elif name in known.ready:
                entry.health = Health.TRAINING if name in ranks else Health.READY
        for name in known.condemned:
            self.hands.kill(name)  # the lost one may have written it down and not done it
        self._crew.members = known.members
        self._formation.restore(known.generation, known.rollbacks)
        self._digests.adopted(
            known.generation,
            known.members,
            shards=self.shards,
            agreed=known.agreed,
            saved=known.saved,
            doubtful=any(failure.cause is Cause.DIVERGED for failure in known.failures),
            doubts=known.doubts,
        )
        self._agreement = self._digests.agreed, self._digests.agreed_checkpoint  # it is in the log
        self._failures.restore(known.answered, known.failures)
        self._skips.restore(known.skipped)
        self._deadline_s = self.hands.now_s() + self.timing.adopt_timeout_s
        self._unheard = {p.name for p in self._crew.alive if p.name in known.ready}
        for name, how in known.unnoticed.items():
            self.on_exit(name, how)
        # no two supervisors of a job ask at the same time
        self._inquiry = round(self.hands.now_s() * 1e9)
        for entry in self._crew.alive:
            self.hands.send(entry.name, Inquiry(number=self._inquiry))
        self._go_on_if_known()

    def _on_status(self, entry: Process, status: Status) -> None:
        """A process says where it is, or where it was when another supervisor asked."""
        if status.number != self._inquiry:
            return
        if self.stage is not Stage.ADOPTING:
            if entry.health is Health.STARTING:  # it told the lost one that it is ready
                self._on_ready(entry)
            return
        entry.step, entry.valid, entry.finished = status.step, status.valid, False
        entry.pending = status.pending
        if status.place in ("joining", "training", "finished"):
            entry.health = Health.TRAINING
            entry.finished = status.place == "finished"
            if (
                self._crew.rank_of(entry.name) is None
                or status.generation != self.generation
                or status.place == "joining"
            ):
                self._past.ready_generation = -1  # it is on its way into another
        elif status.generation and self._crew.rank_of(entry.name) is not None:
            entry.health = Health.PARKED
        elif status.generation:  # its replica is broken; the job may have gone on without it since
            entry.health, entry.valid = Health.READY, False
        elif entry.health is Health.STARTING:
            self._on_ready(entry)
        else:
            entry.health = Health.READY
        self._heard(entry)

    def _heard(self, entry: Process) -> None:
        self._unheard.discard(entry.name)
        self._go_on_if_known()

    def _go_on_if_known(self) -> None:
        """Nobody is waited for longer than ``adopt_timeout_s``: whoever is silent shows that by its
        marks too.
        """
        if self.stage is not Stage.ADOPTING or (
            self._unheard and self.hands.now_s() < self._deadline_s
        ):
            return
        known, members = self._past, self._crew.member_processes()
        if known.generation:
            held = [process.step for process in members if process.valid]
            # Marks of a generation before the one that was to form say nothing.
            said = min(held) if len(held) == len(members) else 0
            self._progress.resumed(self.generation, self.members, max(known.resume_step, said))
        if self._differed is not None:
            self.stage = Stage.TRAINING
            self._diverged(self._differed)
        elif known.generation and self._progress.committed >= self.steps:
            self.stage = Stage.TRAINING
            self._complete()
        elif not known.generation:
            self._start_the_rest()
        elif (
            known.ready_generation == known.generation
            and not known.failures
            and all(p.health is Health.TRAINING for p in members)
        ):
            self.stage = Stage.TRAINING
            self._answer_notices()  # those that came while it was not known where all are
            self._end_if_finished()
        else:
            self.stage = Stage.FORMING  # whatever it was: something to break
            self._break_up()

    def _answer_notices(self) -> None:
        """Of members that were told before their generation trained, or while another supervisor
        was lost.
        """
        if any(member.noticed for member in self._crew.member_processes()):
            self._act(self.strategy.on_notice(self._view()))

    def _start_the_rest(self) -> None:
        """There has been no generation yet: start whom the lost supervisor had not started, and
        form the first.
        """
        self.stage = Stage.STARTING
        gone = [p.name for p in self._crew if p.health is Health.DEAD and not p.noticed]
        if gone:
            self.stop(
                "broken", f"{gone[0]} failed before training began, and so did the coordinator"
            )
            return
        there = [p for p in self._crew if p.health is not Health.DEAD]
        roles = [p.role for p in there]
        for _ in range(self.world - roles.count("worker")):
            self._crew.spawn("worker", self.strategy.start_mode)
        for _ in range(self.strategy.spares_wanted - roles.count("spare")):
            self._crew.spawn("spare", "warm")
        first = tuple(
            p.name for p in self._crew if p.role == "worker" and p.health is not Health.DEAD
        )
        self._formation.want(Form(members=first, state=self._first_state, cause="start"), ())
        self._form_if_ready()

    def _break_up(self) -> None:
        if self._failures.current:
            self._stop_generation()
        else:
            self._suspect(LOST)

    world: int
    shards: int
    steps: int
    _digests: DigestBook

    @abstractmethod
    def on_exit(self, process: str, how: str) -> None:
        """See the controller, as all that follow."""

    @abstractmethod
    def stop(self, outcome: str, reason: str) -> None:
        """End the job."""

    @abstractmethod
    def _diverged(self, found: Disagreement) -> None: ...
    @abstractmethod
    def _complete(self) -> None: ...
    @abstractmethod
    def _on_ready(self, entry: Process) -> None: ...
    @abstractmethod
    def _form_if_ready(self) -> None: ...
    @abstractmethod
    def _act(self, decision: Decision) -> None: ...
    @abstractmethod
    def _view(self) -> ClusterView: ...
    @abstractmethod
    def _end_if_finished(self) -> None: ...
    @abstractmethod
    def _stop_generation(self) -> None: ...
    @abstractmethod
    def _suspect(self, why: str) -> None: ...
