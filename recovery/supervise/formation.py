"""Brings the members of the next generation together: which are awaited, what each is sent, which
have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.memory.header import is_memory
from trainchaos.recovery.policy.costs import Forming
from trainchaos.recovery.policy.interval import Rewinds
from trainchaos.recovery.policy.rank_assignment import CopyPlan
from trainchaos.recovery.policy.strategy import Form, Health, StateFrom
from trainchaos.recovery.process.host import Hands
from trainchaos.recovery.standby.book import StandbyBook
from trainchaos.recovery.supervise.divergence import CheckpointAdvice
from trainchaos.recovery.supervise.failures import answer_of
from trainchaos.recovery.supervise.process_table import Process, ProcessTable
from trainchaos.recovery.transport.wire import Join, Joined, Resume, StateSource

_ABLE = (Health.READY, Health.PARKED)


class Formation:
    """``pending``: the decided form that cannot begin yet; ``generation``: number of the last one
    begun.
    """

    def __init__(
        self,
        hands: Hands,
        table: ProcessTable,
        *,
        shards: int,
        store_port: int,
        join_timeout_s: float,
    ) -> None:
        self._shards = shards
        self._set(None)
        self.generation = 0
        self.rollbacks = 0
        self.answer = ""  # see recovery.policy.strategy.Failure
        self.afresh = True  # the last generation did not take its state from its members
        self.refilled = False  # it had members whose state could not be trusted
        self.restored = False  # it took its state from a checkpoint
        self.rewound = False  # to one on disk, or it began anew
        self.recalled = False  # to one in memory
        self.how: Forming = "form"  # what its members had to do
        self.began_s = 0.0
        self._hands = hands
        self._table = table
        self.standby = StandbyBook(hands.send, hands.record)
        self.store_port = store_port
        self._join_timeout_s = join_timeout_s
        self._deadline_s = 0.0
        self._joined: dict[str, Joined] = {}

    def want(self, form: Form, new: Sequence[str]) -> None:
        """Form this generation next; ``new``: names of the processes that stand behind ``new-0``,
        ``new-1``, ...
        """
        names = tuple(
            new[int(name[4:])] if name.startswith("new-") else name for name in form.members
        )
        self._set(replace(form, members=names))

    def drop(self) -> None:
        """Forget the pending form."""
        self._set(None)

    def exchange(self, name: str, other: str) -> None:
        """Put another process in the place of one that the pending form names."""
        assert self.pending is not None
        members = tuple(other if member == name else member for member in self.pending.members)
        self._set(replace(self.pending, members=members))

    def _set(self, form: Form | None) -> None:
        self.pending, self._unable = form, 0
        self._awaited = frozenset(form.members if form else ())

    def restore(self, generation: int, rollbacks: int) -> None:
        """Continue where another supervisor stopped."""
        self.generation, self.rollbacks = generation, rollbacks

    def awaits(self, name: str) -> bool:
        """Whether the pending form names that process."""
        return name in self._awaited

    def is_late(self, now_s: float, *, moving: bool) -> bool:
        """Whether the members of the last generation have shown no sign of life for too long.
        ``moving``: one did since the last call.
        """
        if moving:
            self._deadline_s = now_s + self._join_timeout_s
        return now_s > self._deadline_s

    def can_begin(self, *, with_spares: bool) -> bool:
        """Whether all members are ready. ``with_spares``: and all other processes too, since a job
        starts at full strength.
        """
        if self.pending is None:
            return False
        if with_spares and not self._table.only(
            *_ABLE, Health.DEAD
        ):  # one that left before is not awaited
            return False
        members = self.pending.members
        for rank in range(self._unable, len(members)):
            if self._table[members[rank]].health not in _ABLE:
                self._unable = rank  # the next check begins here
                return False
        return all(self._table[name].health in _ABLE for name in members)

    def begin(
        self,
        *,
        tell: Callable[[Process], int],
        examine: int,
        word: CheckpointAdvice | None = None,
        rewinds: Rewinds | None = None,
        save_s: float = 0.0,
    ) -> None:
        """Order every member of the pending form to join a new generation, and release all other
        processes; see ``recovery.transport.wire.Join``. ``tell``: sends a process the excluded
        samples that it lacks, and returns how many there are. ``rewinds``: by which they space
        checkpoints of ``save_s`` seconds, None: by what each sees itself.
        """
        form, word = self.pending, word or CheckpointAdvice()
        assert form is not None
        self._let_others_go(form)
        plan, live = self._plan(form)
        sources = {form.members[rank]: form.members[giver] for rank, giver in plan.copies.items()}
        self._note(form, plan.copies)
        self._hands.record(
            Kind.GENERATION_STARTED,
            generation=self.generation,
            members=list(form.members),
            state=form.state.value,
            source=next(iter(sources.values()), None),
            cause=form.cause,
            shards=self._shards,
            sources=sources,
            finish=plan.finish,
            **_said(word, rewinds, save_s),
        )
        left_out = max(tell(self._table[name]) for name in form.members)
        common = Join(
            generation=self.generation,
            rank=0,
            world=len(form.members),
            store_port=self.store_port,
            timeout_s=self._join_timeout_s,
            shards=self._shards,
            standby=self.standby.use(form.members),
            resume=Resume(
                left_out=left_out,
                examine=examine,
                doubts=list(word.doubts),
                agreed=word.agreed,
                anew=word.anew,
                rewinds=rewinds,
            ),
        )
        restore = form.state is StateFrom.CHECKPOINT
        for rank, (name, own) in enumerate(zip(form.members, plan.orders(), strict=True)):
            process = self._table[name]
            process.rank, process.health, process.finished = rank, Health.TRAINING, False
            process.shard = rank % self._shards
            process.live, process.follows = "", False  # it follows until then
            state = StateSource(restore=restore, live=live, finish=plan.finish, **own)
            self._hands.send(name, structs.replace(common, rank=rank, state=state))

    def _plan(self, form: Form) -> tuple[CopyPlan, int]:
        """Who sends its state to whom, and the step from which a live spare may have followed (see
        ``Join``): who lacks what is then found out by all members, and not known here.
        """
        plan = self._table.plan_transfer(form, self._shards)
        live = self._live_step(form, plan)
        direct = live < 0 and self._table.reach_one_another(form.members)
        return plan.spread() if direct else plan, live

    def _note(self, form: Form, copies: Mapping[int, int]) -> None:
        """The next generation is of this form."""
        self.began_s = self._hands.now_s()
        self._deadline_s = self.began_s + self._join_timeout_s
        self.how = how_formed(form.state, copies)
        self._set(None)
        self.generation += 1
        self.rollbacks += form.state is StateFrom.CHECKPOINT
        self.afresh = form.state is not StateFrom.PEER
        self.refilled = bool(form.refill)
        self.answer = answer_of(form.state, form.cause)
        self._joined = {}
        self._table.members = form.members

    def _live_step(self, form: Form, plan: CopyPlan) -> int:
        """The step that the members come to, where one of those that receive it may have followed
        the job up to there; -1: nobody has. A state that cannot be trusted is replaced in any case.
        """
        if form.state is not StateFrom.PEER or form.refill:
            return -1
        if not any(self._table[form.members[rank]].live for rank in plan.copies):
            return -1
        return plan.finish or self._table[form.members[next(iter(plan.copies.values()))]].step

    def _let_others_go(self, form: Form) -> None:
        benched = frozenset(form.bench)
        for process in self._table.where(Health.PARKED):
            if process.name in benched:
                self._table.bench(process)
            elif process.name not in self._awaited:
                self._table.fence(process)

    def joined(self, process: Process, message: Joined) -> Mapping[str, tuple[int, str]] | None:
        """A process holds the generation's state. After the last member: the step and the digest of
        each member.
        """
        if message.generation != self.generation:
            return None
        process.step, process.valid, process.pending = message.step, True, 0
        self._joined[process.name] = message
        if len(self._joined) < len(self._table.members):
            return None
        return {name: (joined.step, joined.digest) for name, joined in self._joined.items()}

    def ready(self, step: int) -> None:
        """All members hold the same state, and train."""
        for waiting in self._table.where(Health.READY):
            waiting.valid = False  # from now on its state falls behind
        names = [joined.checkpoint for joined in self._joined.values() if joined.checkpoint]
        self.restored = bool(names)
        kept = any(is_memory(name) for name in names)
        self.rewound = self.how == "restore" and not kept
        self.recalled = self.how == "restore" and kept
        self._hands.record(
            Kind.GENERATION_READY,
            step=step,
            generation=self.generation,
            members=list(self._table.members),
            resume_step=step,
            checkpoint=names[0] if names else None,
        )


def how_formed(state: StateFrom, copies: Collection[object] | None) -> Forming:
    """What takes the members longest besides forming a group. ``copies``: members that copy it."""
    if state is StateFrom.CHECKPOINT:
        return "restore"
    return "copy" if copies else "form"


def _said(word: CheckpointAdvice, rewinds: Rewinds | None, save_s: float) -> dict[str, Any]:
    """What an event says of checkpoints, where there is something to say."""
    said: dict[str, Any] = {"doubts": word.doubts} if word.doubts else {}
    return said if rewinds is None else {**said, "rewinds": rewinds.fields(save_s)}
