"""A rank's side of its dialogue with the supervisor: which orders it received, what state it holds,
whether it is in a generation, and what follows. Free of threads, clocks, tensors and process
groups.

Used by ``recovery.rank.job`` with ``recovery.rank.agent``, and by the simulated rank
(``harness.sim.rank.rank``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainchaos.recovery.transport.wire import (
    Abort,
    Agreed,
    Finished,
    Follow,
    Join,
    LeaveOut,
    Parked,
    PauseRequest,
    Settle,
    Status,
    Stop,
)

Order = Join | Follow | Settle | LeaveOut | Abort | Stop
"""Messages that wait for the training thread, in order; all others are noted on receipt."""

Why = Literal["aborted", "pause", "nonfinite", "failed"]
"""Why a rank parks."""


@dataclass(kw_only=True)
class SupervisorOrders:
    """What the supervisor has said, whether or not the training thread knows it yet.

    ``aborted_generation``: the last one to leave; ``told_generation``: the last one to join;
    ``agreed``: the last step, in the history of this rank's state, at which all replicas are known
    to have been the same; ``pause_wanted``: with the next gradients this rank asks all ranks to
    park; ``save_wanted``: and to save before; ``shard``: the part that this spare is to follow.
    """

    aborted_generation: int = 0
    told_generation: int = 0
    agreed: int = -1
    pause_wanted: bool = False
    save_wanted: bool = False
    shard: int = -1

    def take(self, message: object) -> Order | None:
        """Note what a message says; returns it if the training thread must act on it."""
        match message:
            case Abort():
                self.aborted_generation = max(self.aborted_generation, message.generation)
            case Join():
                self.told_generation = message.generation
                self.agreed = message.resume.agreed if message.resume.agreed >= 0 else self.agreed
            case Follow():
                self.shard = message.shard
            case Agreed():
                self.agreed = message.step
            case PauseRequest():
                self.pause_wanted, self.save_wanted = True, self.save_wanted or message.save
        return message if isinstance(message, Order) else None


@dataclass(kw_only=True)
class HeldState:
    """What a process holds. ``valid``: a whole state (a fresh process has none until it has joined
    a generation); ``fresh``: the initial state, which nothing else could bring back; ``pending``:
    the step whose gradients are complete here and that lacks only the other ranks' totals (0:
    none); ``retries``: it left for a value that was not finite, with a state that is whole but for
    what it may have got wrong.
    """

    valid: bool = False
    fresh: bool = True
    pending: int = 0
    retries: bool = False

    def restores(self) -> None:
        """A checkpoint is about to be loaded over the state."""
        self.valid, self.pending = False, 0

    def restored(self, *, found: bool) -> None:
        """Loading is over. ``found``: there was a checkpoint; else the state is unchanged."""
        self.valid, self.fresh = True, self.fresh and not found

    def receives(self) -> None:
        """A peer's state is about to be copied over this one, which is whole again once all of it
        has arrived.
        """
        self.valid = self.fresh = False
        self.pending = 0

    def gives_up(self) -> None:
        """What a lost attempt has changed cannot be put back."""
        self.valid = self.fresh = False
        self.pending = 0

    def begins(self) -> None:
        """A generation trains on from this state; a half-done step of an earlier generation is
        dropped.
        """
        self.pending, self.retries = 0, False

    def applied(self) -> None:
        """A step was applied."""
        self.fresh, self.pending = False, 0


class Membership:
    """Membership of one process in the job. ``generation``: the one it is in, or was in last;
    ``inside``: it is in a generation or on its way into one (``joining``). ``steps``: of the whole
    job.
    """

    def __init__(self, heard: SupervisorOrders, *, steps: int) -> None:
        self.heard = heard
        self.holding = HeldState()
        self.generation = 0
        self.inside = self.joining = False
        self._steps = steps
        self._left_out: dict[int, int] = {}

    @property
    def lost(self) -> bool:
        """Whether the supervisor has aborted this generation."""
        return self.heard.aborted_generation >= self.generation > 0

    def trains(self, step: int) -> bool:
        """Whether there is a step to train after ``step``."""
        return self.inside and not self.lost and step < self._steps

    def finished(self, step: int) -> Finished | None:
        """What a rank reports when the whole job is done, before it waits for orders to help other
        ranks.
        """
        return Finished(step=step) if self.inside and step >= self._steps else None

    def note_exclusions(self, order: LeaveOut) -> None:
        """Note samples that the job leaves out. Raises RuntimeError when an earlier part of the
        list is missing.
        """
        if not order.after:
            self._left_out = {}
        if order.after != len(self._left_out):
            raise RuntimeError(
                f"told of samples after {order.after}, and of {len(self._left_out)} before"
            )
        self._left_out.update(zip(order.samples, order.since, strict=True))

    def must_park(self, order: Abort) -> bool:
        """Whether the rank parks for this order. If it has left already, its earlier report answers
        the order.
        """
        return self.inside and order.generation >= self.generation

    def joins(self, order: Join) -> None:
        """The rank is on its way into another generation, which wants nothing of it yet."""
        # First, so that there is no moment at which the rank is in no generation and has no order
        # to join one.
        self.inside = self.joining = True
        self.generation = order.generation
        self.heard.pause_wanted = self.heard.save_wanted = False

    def left_out(self, order: Join) -> Mapping[int, int]:
        """Sample -> first step without it, in this generation. Raises RuntimeError when part of the
        list is missing: a rank must not train with other samples than its peers.
        """
        if order.resume.left_out != len(self._left_out):
            raise RuntimeError(
                f"{order.resume.left_out} samples are left out, and it was told of"
                f" {len(self._left_out)}"
            )
        return self._left_out

    def begins(self, step: int) -> None:
        """The generation trains on from ``step``. Agreements on later steps, from before all ranks
        went back, say nothing of what is saved from now on.
        """
        self.holding.begins()
        self.heard.agreed = min(self.heard.agreed, step)

    def joined(self) -> None:
        """The rank is in, and has reported it."""
        self.joining = False

    def left(self) -> None:
        """The rank has left its generation's group."""
        self.inside = self.joining = False

    def why_lost(self) -> Why:
        """Why the rank parks when its group is broken."""
        return "aborted" if self.lost else "failed"

    def status(self, step: int, number: int, live: str = "") -> Status:
        """The answer to inquiry ``number``. An order to join counts before the training thread has
        taken it. ``live``: where this process is fed as long as it waits.
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
            live=live,
            shard=self.heard.shard,
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
        """What the rank reports on leaving its generation, with the state it holds by then."""
        self.holding.retries = why == "nonfinite" and self.holding.valid
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
    """Whether the rank keeps its connections until it joins the next generation: where all ranks
    park after the same collective, closing them now could cut off a rank that is still finishing
    it.
    """
    return why in ("pause", "nonfinite")
