"""Takes over a job from a supervisor that is gone, by the job's log and by asking the ranks.

The log says which processes were started and which ended, which generation there is and what
failed; only the ranks know where they are now. If all of them train, they train on undisturbed.
Otherwise the generation is broken and the strategy decides anew: a decision that the lost
supervisor made but did not record is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER
from trainchaos.recovery.checkpoint.memory.header import is_memory
from trainchaos.recovery.policy.costs import CostMeter
from trainchaos.recovery.policy.doubts import Doubt
from trainchaos.recovery.policy.strategy import ANNOUNCED, Cause, Failure, Health, StateFrom
from trainchaos.recovery.supervise.failures import answer_of
from trainchaos.recovery.supervise.formation import how_formed
from trainchaos.recovery.supervise.job_state import KILLED_FOR, JobState
from trainchaos.recovery.supervise.process_table import Process
from trainchaos.recovery.transport.wire import Follow, Inquiry, Status

_NO_FAILURE = ("start", "grow", *ANNOUNCED)


@dataclass(kw_only=True)
class JobRecord:
    """What a log says of a job. ``dead``: exited, or killed by the lost supervisor; ``condemned``:
    those of them it may not have had time to kill; ``warned``: those whose place is about to fail;
    ``leaving``: those that were asked to end and have not; ``ready_generation``: the last that
    trained; ``failures``: not answered by it; ``unnoticed``: exits for which no failure was
    declared, and how they happened; ``skipped``: excluded samples and the first step without them;
    ``shard``: the part of the model held by each process that was ever a member, or was told to
    follow one; ``follow``: those that were told, and never were a member; ``agreed``, ``saved``:
    the last step at which the replicas were the same, and the checkpoint that this vouches for;
    ``doubts``: checkpoints in doubt that are not known to be set aside; ``pace``: what was
    learned of steps and silences, ``meter``: of what recoveries cost.
    """

    roles: dict[str, str] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)
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
    follow: set[str] = field(default_factory=set)
    agreed: int | None = None
    saved: int | None = None
    doubts: tuple[Doubt, ...] = ()
    pace: Mapping[str, Any] | None = None
    meter: CostMeter = field(default_factory=CostMeter)


def past(events: Sequence[Event], asked: Collection[str] = ()) -> JobRecord:
    """Read a supervisor's log. Pure. ``asked``: processes that were asked to end, alive or not.

    Keepers of checkpoints are not included: their starter watches them.
    """
    found, answer, afresh = JobRecord(dead=set(asked), leaving=set(asked)), "", False
    found.meter = costs_in(events)
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
            case Kind.FAILURE_DETECTED if data["cause"] == Cause.WARNING:
                found.warned.add(data["process"])  # it works on: there is nothing to recover from
            case Kind.FAILURE_DETECTED:
                found.failures.append(failure := _failure(event))
                died = failure.cause in (Cause.EXIT, *KILLED_FOR)
                found.dead |= {failure.process} if died else set()
                found.condemned |= {failure.process} if failure.cause in KILLED_FOR else set()
                found.unnoticed.pop(failure.process, None)
            case Kind.SPARE_PLACED:
                found.shard[data["process"]] = data["shard"]
                found.follow.add(data["process"])
            case Kind.GENERATION_STARTED:
                found.members, found.generation = tuple(data["members"]), event.generation
                found.follow -= {*found.members}
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
            case Kind.PACE_LEARNED:
                found.pace = data
            case Kind.REPLICAS_AGREED:
                found.agreed, found.saved = event.step, data["saved"]
            case Kind.DOUBTS_SETTLED:
                found.doubts = _doubts_of(data["left"])
            case Kind.SAMPLES_SKIPPED:
                found.skipped |= dict.fromkeys(data["samples"], data["since"])
    return found


def costs_in(events: Sequence[Event]) -> CostMeter:
    """What a supervisor's log shows of what recoveries cost. What saves took is in no supervisor's
    log, and measured anew with the next one.
    """
    meter, spawned = CostMeter(), dict[str, float]()
    began: Event | None = None
    fails = False
    for event in events:
        data, now_s = event.data, event.time_ns / 1e9
        match event.kind:
            case Kind.PROCESS_SPAWNED if data["role"] != KEEPER:
                spawned[data["process"]] = now_s
            case Kind.PROCESS_READY if data["process"] in spawned:
                meter.started(now_s - spawned.pop(data["process"]))
            case Kind.GENERATION_STARTED:
                began, fails = event, data["cause"] not in _NO_FAILURE
                if fails:
                    meter.failed()
            case Kind.GENERATION_READY if began is not None:
                state, name = StateFrom(began.data["state"]), data["checkpoint"]
                how = how_formed(state, began.data.get("sources"))
                meter.formed(how, now_s - began.time_ns / 1e9)
                if how == "restore" and fails:
                    (meter.recalled if name and is_memory(name) else meter.rewound)()
                meter.trains()
                meter.saw(len(data["members"]), data["resume_step"], now_s)
            case Kind.REPLICAS_AGREED if began is not None:
                meter.saw(len(began.data["members"]), event.step or 0, now_s)
    return meter


def _failure(event: Event) -> Failure:
    data = event.data
    return Failure(
        process=data["process"] or "",
        rank=data["rank"],
        cause=Cause(data["cause"]),
        step=event.step or 0,
        time_s=event.time_ns / 1e9,
        generation=event.generation,
        applied=bool(data.get("applied")),
    )


def _doubts_of(pairs: Sequence[Sequence[int]]) -> tuple[Doubt, ...]:
    return tuple((before, step) for before, step in pairs)


class JobCondition(Enum):
    """State of a job that is taken over."""

    NOT_BEGUN = auto()  # there has been no generation
    UNDISTURBED = auto()  # all members train
    BROKEN = auto()  # something failed, or was under way
    COMPLETE = auto()  # every step is committed


class Adoption:
    """Finds out where a job is, from its log and its processes. ``state``: what a first generation
    begins with.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._past = JobRecord()
        self._undisturbed = False
        self._unheard: set[str] = set()
        self._inquiry = -1
        self._deadline_s = 0.0
        self.state = StateFrom.INITIAL

    def restore(self, known: JobRecord, state: StateFrom) -> None:
        """Take over what the log says."""
        self._past, self.state = known, state
        self._undisturbed = known.ready_generation == known.generation and not known.failures
        job = self._job
        self._restore_processes(known)
        for name in known.condemned:
            job.hands.kill(name)  # the lost supervisor may have recorded the kill without doing it
        job.table.members = known.members
        job.formation.restore(known.generation, known.rollbacks)
        job.digests.adopted(
            known.generation,
            known.members,
            shards=job.shards,
            agreed=known.agreed,
            saved=known.saved,
            doubtful=any(failure.cause is Cause.DIVERGED for failure in known.failures),
            doubts=known.doubts,
        )
        job.agreement.adopted()
        job.failures.restore(known.answered, known.failures)
        job.excluded.restore(known.skipped)
        job.meter = known.meter
        if known.pace is not None:
            job.progress.detector.pace.recall(known.pace, known.members)
        self._deadline_s = job.hands.now_s() + job.timing.adopt_timeout_s
        self._unheard = {p.name for p in job.table.alive if p.name in known.ready}

    def _restore_processes(self, known: JobRecord) -> None:
        ranks = {name: rank for rank, name in enumerate(known.members)}
        for name, role in known.roles.items():
            process = self._job.table.know(name, role)
            process.rank = ranks.get(name)
            process.shard, process.follows = known.shard.get(name), name in known.follow
            process.warned = name in known.warned
            if name in known.dead:
                process.health, process.expected_exit = Health.DEAD, True
                process.leaving = name in known.leaving
            elif name in known.ready:
                process.health = Health.TRAINING if name in ranks else Health.READY

    def ask(self) -> None:
        """Ask every process for its status."""
        hands = self._job.hands
        # unique, because two supervisors of a job never ask in the same nanosecond
        self._inquiry = round(hands.now_s() * 1e9)
        for process in self._job.table.alive:
            hands.send(process.name, Inquiry(number=self._inquiry))

    def is_answer(self, status: Status) -> bool:
        """Whether the message answers this supervisor, and not an earlier one."""
        return status.number == self._inquiry

    def place(self, process: Process, status: Status) -> None:
        """A process reports its status. One that is not known to be ready stays STARTING if it is
        in no generation.
        """
        is_member = self._job.table.rank_of(process.name) is not None
        process.step, process.valid, process.finished = status.step, status.valid, False
        process.pending = status.pending
        if status.place in ("joining", "training", "finished"):
            process.health = Health.TRAINING
            process.finished = status.place == "finished"
            here = is_member and status.generation == self._job.generation
            if not here or status.place == "joining":
                self._undisturbed = False  # it is on its way into another generation
        elif status.generation and is_member:
            process.health = Health.PARKED
        elif status.generation:  # the job may have left its replica behind
            process.health, process.valid = Health.READY, False
        elif process.health is not Health.STARTING:
            # it was never told of its rank
            process.health, process.follows = Health.READY, status.shard >= 0
            process.shard = status.shard if process.follows else None
            if process.follows and not status.live:  # its answer may be lost, or still come
                self._job.hands.send(process.name, Follow(shard=status.shard))

    def heard(self, process: Process) -> None:
        """The process has answered, or never will."""
        self._unheard.discard(process.name)

    def conclude(self) -> JobCondition | None:
        """Where the job is. None as long as a process has neither answered nor had
        ``adopt_timeout_s`` to do so; the marks of one that stays silent longer show its state too.
        """
        job, known = self._job, self._past
        if self._unheard and job.hands.now_s() < self._deadline_s:
            return None
        if not known.generation:
            return JobCondition.NOT_BEGUN
        members = job.table.member_processes()
        held = [process.step for process in members if process.valid]
        # Marks of a generation before the one being formed say nothing.
        said = min(held) if len(held) == len(members) else 0
        job.progress.resumed(job.generation, job.members, max(known.resume_step, said))
        if job.progress.committed >= job.steps:
            return JobCondition.COMPLETE
        # by those whose state is whole: others are on their way into a generation, and one that
        # died may have been a step behind
        if held and all(process.health is not Health.DEAD for process in members):
            job.progress.reached(max(job.progress.committed, min(held)))
        if self._undisturbed and all(p.health is Health.TRAINING for p in members):
            return JobCondition.UNDISTURBED
        return JobCondition.BROKEN
