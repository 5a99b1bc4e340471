"""What a job needs of a reducer of gradients, and what all ranks know after a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from trainchaos.recovery.collectives.buckets import Buffers
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.state.finite import Amount


class Asks(NamedTuple):
    """What a rank asks all ranks to do after the step, with its gradients: stop, save on disk, save
    in memory.
    """

    pause: bool = False
    save: bool = False
    save_memory: bool = False


NOTHING = Asks()


def heard(sums: Sequence[float]) -> Asks:
    """What any rank has asked for, from the sums over all."""
    return Asks(*(each > 0 for each in sums))


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What all ranks know after a reduction. ``loss``: mean over ``samples``; ``blamed``: ranks
    with non-finite values; ``asks``: what any rank asked for, and all do.
    """

    loss: float
    samples: int
    blamed: tuple[int, ...]
    grad_norm: float
    asks: Asks = NOTHING

    @property
    def finite(self) -> bool:
        """Whether loss and gradients may be applied."""
        return (
            not self.blamed
            and self.grad_norm == self.grad_norm
            and abs(self.grad_norm) != float("inf")
        )


class Reducer(Protocol):
    """Reduces the gradients of a job over the ranks of its generation.

    The caller's loss must be a *sum* over its samples; shares may then be uneven. Optional seams:
    ``pace`` is called with the bytes about to go over this rank's link, ``reached`` in the middle
    of backward, ``check`` wherever an abort should be noticed (it raises GenerationLost),
    ``instead`` before each collective: it may give work to wait for instead.
    """

    pace: Callable[[int], None] | None
    reached: Callable[[], None] | None
    check: Callable[[], None] | None
    instead: Callable[[], Any] | None
    wire_bytes: int

    def new_generation(self, group: Group) -> None:
        """Use this group from now on, and count collectives anew."""

    def let_go(self) -> None:
        """The job is over: gradients that come from now on are the script's own."""

    def starts_with(self, digest: str) -> None:
        """What this rank holds as the generation begins, in hexadecimal digits: a part of it goes
        with the flags of the first step, and ``finish`` raises GenerationLost unless all that hold
        the same have sent the same.
        """

    def rehearse(self) -> None:
        """Clear gradients and get ready for a backward pass that is not reduced."""

    def pin(self) -> None:
        """Have torch allocate now the pinned host memory that gloo uses to reduce the gradients of
        a GPU; torch keeps it.
        """

    def begin(self) -> None:
        """Clear gradients and get ready for one backward pass."""

    def expect(self, *, last: bool = True) -> None:
        """A backward pass of the step comes now; ``last``: no other follows it before ``finish`` or
        ``keep``. Raises RuntimeError when parameters were frozen or unfrozen between two passes of
        a step.
        """

    def expect_several(self) -> None:
        """Backward passes of several micro-batches come now, in an order that is not known here;
        nothing is reduced before ``finish``.
        """

    def require(self) -> None:
        """The optimizer is about to use the gradients. Raises RuntimeError when they are gone."""

    def keep(self, *, rank: int, loss_sum: Amount, count: int) -> None:
        """End a micro-batch that is not this rank's last of the step. Raises RuntimeError where
        there is but one.
        """

    def finish(self, *, rank: int, loss_sum: Amount, count: int, asks: Asks = NOTHING) -> Reduced:
        """Reduce what is left and wait, once for a GPU. Raises GenerationLost. Gradients are means
        over all samples afterwards.
        """

    def clip(self, grad_norm: float, limit: float) -> None:
        """Scale gradients so that their norm is at most ``limit`` (as
        torch.nn.utils.clip_grad_norm_ does).
        """

    def all_finite(self) -> bool:
        """Whether this rank's own gradients, as they are now, are finite."""

    def held(self) -> list[Buffers]:
        """The buffers of the step's gradients as they are now; see ``hand_over``."""

    def hand_over(self, others: Sequence[Buffers]) -> None:
        """Leave the buffers of the step to whoever has asked for them (``held``), and use
        ``others`` from the next ``begin`` on, or new ones where they do not fit.
        """

    def broken_off(self) -> bool:
        """The step is not going on. Whether its gradients are complete all the same, but for what
        ``finish`` returns: they are kept then until the next ``begin``, and ``settle`` makes use of
        them.
        """

    def settle(self, samples: Amount) -> None:
        """Make means of gradients that are sums over so many samples, once."""
