"""A subset of the ranks of a generation, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from trainchaos.recovery.collectives.group import Group

DEVICE_ERRORS = tuple(
    kind
    for kind in (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", None))
    if kind is not None
)
"""An error that joining another generation cannot cure: its device fails the rank, not a peer."""
MOST_BEGUN = 64  # kept, until those that nobody waited for are looked through


class GenerationLost(Exception):
    """This generation cannot go on: a peer is gone, the link broke, or the supervisor
    aborted it.
    """


class Circle:
    """Some ranks of a generation, and what they do together. ``ranks``: their numbers in the
    generation, in order; ``rank``: this one's.

    Used by the training thread. A circle of one rank has nothing to exchange.
    """

    def __init__(self, group: Group, ranks: Sequence[int], made: Any) -> None:
        self.rank = group.rank
        self.backend = group.backend
        self.device = group.device
        self.ranks: Sequence[int] = tuple(ranks)
        self._group = group
        self._made = made

    def start(self, operation: Callable[[Any], dist.Work]) -> dist.Work:
        """Begin an operation on torch's process group. Its tensors are kept until it is waited for,
        as ``operation`` refers to them. Raises GenerationLost.
        """
        try:
            work = operation(self._made)
        except DEVICE_ERRORS:
            raise
        except RuntimeError as error:
            raise GenerationLost(first_line(error)) from error
        self._group.began(work, operation)
        return work

    def start_all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> dist.Work | None:
        """Begin to sum ``tensor`` over the ranks, in place; None: nothing to wait for. Raises
        GenerationLost.
        """
        if self._made is None or not tensor.numel():
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self.start(lambda made: made.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy ``tensor`` from rank ``source`` to all. Raises GenerationLost."""
        self.wait(self.start_broadcast(tensor, source))
        self.settle()

    def start_broadcast(self, tensor: Tensor, source: int) -> dist.Work | None:
        """Begin to copy ``tensor``; None: nothing to wait for. Raises GenerationLost."""
        if self._made is None:
            return None
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(source)
        return self.start(lambda made: made.broadcast([tensor], options))

    def settle(self) -> None:
        """Wait until what was received is in place and whole. Raises GenerationLost."""
        if self._made is not None:
            self._group.settle()

    def wait(self, work: dist.Work | None) -> None:
        """Have what comes next on this thread come after an operation. Raises GenerationLost when
        it fails or the generation is aborted.
        """
        if work is not None:
            self._group.wait(work)

    def is_over(self, work: dist.Work) -> None:
        """An operation has ended that ``wait`` is not called with."""
        self._group.begun.waited_for(work)

    def read(self, values: Tensor) -> list[Any]:
        """The numbers of a small tensor; see ``Group.read``."""
        return self._group.read(values)

    def close(self) -> None:
        """Release torch's process group."""
        self._made = None


class Begun:
    """Operations that were begun, and that nothing comes after yet. ``unfinished`` may be asked on
    any thread.
    """

    def __init__(self) -> None:
        self._works: dict[int, tuple[dist.Work, Any]] = {}

    def add(self, work: dist.Work, uses: Any) -> None:
        """``uses``: what is kept with it."""
        if len(self._works) >= MOST_BEGUN and uses is None:
            kept = list(self._works.items())
            self._works = {number: one for number, one in kept if not one[0].is_completed()}
        self._works[id(work)] = (work, uses)

    def waited_for(self, work: dist.Work) -> None:
        """What comes next comes after it. Called on any thread."""
        self._works.pop(id(work), None)

    def unfinished(self) -> int:
        """How many are not done."""
        return sum(not work.is_completed() for work, _ in list(self._works.values()))

    def take(self) -> list[tuple[dist.Work, Any]]:
        """All of them, with what they use; they are forgotten."""
        works, self._works = self._works, {}
        return [*works.values()]


def ended_in(work: dist.Work, limit: timedelta) -> bool:
    """Whether an operation has ended, well or badly, after waiting up to ``limit`` for it."""
    try:
        work.wait(limit)
    except RuntimeError:
        # Failed, or the time was up; it may even have succeeded since then, so the error itself
        # tells nothing.
        return bool(work.is_completed())
    return True


def first_line(error: Exception) -> str:
    """What an error says, cut to a line."""
    return str(error).split("\n", 1)[0][:200]


def require_no_group() -> None:
    """Raise RuntimeError if the process has a default process group."""
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed.init_process_group was called: the job makes the default process"
            " group and its mesh; leave the call out, and use job.mesh"
        )


def lost_in(error: BaseException | None) -> GenerationLost | None:
    """The lost generation that another error was raised for, as torch's schedules do."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, GenerationLost):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
