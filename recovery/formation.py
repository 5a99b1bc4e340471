"""Bringing the members of the next generation together: who is awaited, who is told what, who has joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from chaos.events import Kind
from recovery.crew import Crew, Process
from recovery.strategy import Form, Health, StateFrom
from recovery.supervision import Hands
from recovery.wire import Join, Joined

_ABLE = (Health.READY, Health.PARKED)


class Formation:
    """``pending``: what is decided but cannot begin yet; ``generation``: number of the last one begun."""

    def __init__(self, hands: Hands, crew: Crew, *, store_port: int, join_timeout_s: float) -> None:
        self.pending: Form | None = None
        self.generation = 0
        self.rollbacks = 0
        self._hands = hands
        self._crew = crew
        self.store_port = store_port
        self._join_timeout_s = join_timeout_s
        self._joined: dict[str, Joined] = {}

    def want(self, form: Form, new: Sequence[str]) -> None:
        """Form this next; ``new``: names of the processes that stand behind ``new-0``, ``new-1``, ..."""
        names = tuple(new[int(name[4:])] if name.startswith("new-") else name for name in form.members)
        self.pending = replace(form, members=names)

    def restore(self, generation: int, rollbacks: int) -> None:
        """Go on where another supervisor ended."""
        self.generation, self.rollbacks = generation, rollbacks

    def awaits(self, name: str) -> bool:
        """Whether the pending form names that process."""
        return self.pending is not None and name in self.pending.members

    def can_begin(self, *, with_spares: bool) -> bool:
        """Whether all members can be told. ``with_spares``: a job starts with everything it was promised."""
        if self.pending is None:
            return False
        wanted = self._crew if with_spares else [self._crew[name] for name in self.pending.members]
        return all(process.health in _ABLE for process in wanted)

    def begin(self, *, skip: Mapping[int, int], examine: int) -> None:
        """Tell every member of the pending form to join a new generation."""
        form = self.pending
        assert form is not None
        source, receivers = self._crew.plan_transfer(form)
        self.pending = None
        self.generation += 1
        self.rollbacks += form.state is StateFrom.CHECKPOINT
        self._joined = {}
        self._crew.members = form.members
        self._hands.record(
            Kind.GENERATION_STARTED,
            generation=self.generation,
            members=list(form.members),
            state=form.state.value,
            source=None if source is None else form.members[source],
            cause=form.cause,
        )
        for rank, name in enumerate(form.members):
            process = self._crew[name]
            process.rank, process.health, process.finished = rank, Health.TRAINING, False
            join = Join(
                generation=self.generation,
                rank=rank,
                members=list(form.members),
                store_port=self.store_port,
                source=source,
                receivers=receivers,
                restore=form.state is StateFrom.CHECKPOINT,
                timeout_s=self._join_timeout_s,
                skip=dict(skip),
                examine=examine,
            )
            self._hands.send(name, join)

    def joined(self, process: Process, message: Joined) -> bool:
        """A process holds the generation's state. True when it was the last one."""
        if message.generation != self.generation:
            return False
        process.step, process.valid = message.step, True
        self._joined[process.name] = message
        if len(self._joined) < len(self._crew.members):
            return False
        names = [joined.checkpoint for joined in self._joined.values() if joined.checkpoint]
        self._hands.record(
            Kind.GENERATION_READY,
            step=message.step,
            generation=self.generation,
            members=list(self._crew.members),
            resume_step=message.step,
            checkpoint=names[0] if names else None,
        )
        return True
