"""What a rank and its supervisor say to each other, as the rank has it: what it was told, what it
holds, whether it is in a generation, and what follows from that. No thread, clock, tensor or
process group here.

``recovery.rank.job`` with ``recovery.rank.agent`` goes by it, and so does the simulated rank
(``harness.sim.rank.rank``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recovery.data.told import Told
from recovery.transport.wire import (
    Abort,
    Agreed,
    Finished,
    Join,
    LeaveOut,
    Parked,
    PauseRequest,
    Status,
    Stop,
)

Order = Join | LeaveOut | Abort | Stop
"""What waits for the training thread, in order; all else is noted by whoever listens."""

Why = Literal["aborted", "pause", "nonfinite", "failed"]
"""Why a rank parks."""


@dataclass(kw_only=True)
class Heard:
    """What the supervisor has said, whether the training thread knows it or not.

    ``aborted_generation``: the last that is to be left; ``told_generation``: the last it was told
    to join; ``agreed``: the last step on the way to what this rank holds at which the replicas were
    the same, as far as is known; ``pause_wanted``, ``save_wanted``: what this rank is to have all
    park for, and save before, with the next gradients.
    """

    aborted_generation: int = 0
    told_generation: int = 0
    agreed: int = -1
    pause_wanted: bool = False
    save_wanted: bool = False

    def take(self, message: object) -> Order | None:
        """Note what a message says; returned is what the training thread is to do."""
        match message:
            case Abort():
                self.aborted_generation = max(self.aborted_generation, message.generation)
            case Join():
                self.told_generation = message.generation
                self.agreed = message.agreed if message.agreed >= 0 else self.agreed
            case Agreed():
                self.agreed = message.step
            case PauseRequest():
                self.pause_wanted, self.save_wanted = True, self.save_wanted or message.save
        return message if isinstance(message, Order) else None


@dataclass(kw_only=True)
class Holding:
    """What a process holds. ``valid``: a whole state (a fresh process holds nothing of the job
    until it has joined a generation); ``fresh``: the initial state, which nothing else could bring
    back; ``pending``: the step whose gradients are complete here and only lack the others' word (0:
    none).
    """

    valid: bool = False
    fresh: bool = True
    pending: int = 0

    def restores(self) -> None:
        """A checkpoint is about to be loaded over it."""
        self.valid, self.pending = False, 0

    def restored(self, *, found: bool) -> None:
        """That is over. ``found``: there was one; else it is as it was."""
        self.valid, self.fresh = True, self.fresh and not found

    def receives(self) -> None:
        """A peer's state is about to be copied over it; it is whole again when all has come."""
        self.valid = self.fresh = False
        self.pending = 0

    def begins(self) -> None:
        """A generation trains on from it: what an earlier one has left half done is dropped."""
        self.pending = 0

    def applied(self) -> None:
        """A step was."""
        self.fresh, self.pending = False, 0


class Membership:
    """Of one process. ``generation``: the one that it is in, or was in last; ``inside``: it is in
    one, or on its way there (``joining``). ``steps``: of the whole job.
    """

    def __init__(self, heard: Heard, *, steps: int) -> None:
        self.heard = heard
        self.holding = Holding()
        self.generation = 0
        self.inside = self.joining = False
        self._steps = steps
        self._left_out = Told()

    @property
    def lost(self) -> bool:
        """Whether the supervisor has aborted this generation."""
        return self.heard.aborted_generation >= self.generation > 0

    def trains(self, step: int) -> bool:
        """Whether there is a step to train after this one."""
        return self.inside and not self.lost and step < self._steps

    def finished(self, step: int) -> Finished | None:
        """What it says before it waits for orders with the whole job done, so that others can be
        helped.
        """
        return Finished(step=step) if self.inside and step >= self._steps else None

    def hears(self, order: LeaveOut) -> None:
        """Samples that the job leaves out. Raises RuntimeError when some before them did
        not come.
        """
        self._left_out.hear(order)

    def leaves(self, order: Abort) -> bool:
        """Whether it parks for that. One that comes when it has left already is answered by what it
        said then.
        """
        return self.inside and order.generation >= self.generation

    def joins(self, order: Join) -> None:
        """It is on its way into another generation, which wants nothing of it yet."""
        # First, so that at no moment it is in no generation, and not told to join one either.
        self.inside = self.joining = True
        self.generation = order.generation
        self.heard.pause_wanted = self.heard.save_wanted = False

    def left_out(self, order: Join) -> Mapping[int, int]:
        """Sample -> first step without it, in this generation. Raises RuntimeError as
        ``recovery.data.told``.
        """
        return self._left_out.of(order)

    def begins(self, step: int) -> None:
        """Its generation trains on from there. What the replicas agreed on later, before all went
        back behind it, says nothing of what is saved from now on.
        """
        self.holding.begins()
        self.heard.agreed = min(self.heard.agreed, step)

    def joined(self) -> None:
        """It is in, and has said so."""
        self.joining = False

    def left(self) -> None:
        """It is out of its generation's group."""
        self.inside = self.joining = False

    def why_lost(self) -> Why:
        """Why it parks when its group is broken."""
        return "aborted" if self.lost else "failed"

    def status(self, step: int, number: int) -> Status:
        """The answer to inquiry ``number``. An order to join counts before the training thread has
        taken it.
        """
        told = self.heard.told_generation > self.generation
        member: Literal["finished", "training"] = "finished" if step >= self._steps else "training"
        inside: Literal["joining", "finished", "training"] = "joining" if self.joining else member
        return Status(
            place="joining" if told else inside if self.inside else "waiting",
            generation=self.generation,
            step=step,
            valid=self.holding.valid,
            pending=self.holding.pending,
            number=number,
        )

    def parked(
        self,
        why: Why,
        *,
        step: int,
        error: str = "",
        blamed: Sequence[int] = (),
        samples: Sequence[int] = (),
    ) -> Parked:
        """What it says when it has left its generation, with what it holds by then."""
        return Parked(
            generation=self.generation,
            step=step,
            valid=self.holding.valid,
            why=why,
            error=error,
            blamed=list(blamed),
            samples=list(samples),
            pending=self.holding.pending,
        )


def stays_connected(why: Why) -> bool:
    """Whether it keeps its connections until it joins the next generation: where all park after the
    same collective, breaking them now could cut off one that is still finishing it.
    """
    return why in ("pause", "nonfinite")
