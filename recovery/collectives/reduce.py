"""Averages gradients over a group that changes: bucketed, overlapping backward, bound to no process
group object.

Gradients live in flat buckets in the reverse order of the parameters, each reduced as soon as its
last gradient is there, as DistributedDataParallel does (Li et al., VLDB 2020); unlike it, nothing
has to be rebuilt when the group changes. The last bucket carries a tail: loss, sample count, wishes
and one non-finite flag a rank, so that all ranks learn of them alike and no extra round is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainchaos.recovery.collectives.buckets import Bucket, Buffers, check_types, make_buckets
from trainchaos.recovery.collectives.group import Circle, GenerationLost, Group
from trainchaos.recovery.state.finite import Amount, NonFiniteCheck, all_finite


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


_LOSS, _COUNT, _ASKS = range(3)
_FLAGS = _ASKS + len(NOTHING)
_EXACT = 1 << 24  # integers below are exact in float32
_FLAG_ROOM = 1 << 10  # flags of a rank's micro-batches add up to less


class Reducer:
    """Reduces the gradients of a job over the ranks of its generation: those of some parameters in
    flat buffers, each as soon as its last gradient is there. The base of all reducers.

    The caller's loss must be a *sum* over its samples; shares may then be uneven. ``entering``:
    called with a running number before each collective. Optional seams: ``pace`` is called with the
    bytes about to go over this rank's link, ``reached`` in the middle of backward, ``check``
    wherever an abort should be noticed (it raises GenerationLost), ``instead`` before each
    collective: it may give work to wait for instead, ``waiting`` before (True) and after (False)
    each wait in the midst of a pass.
    """

    def __init__(self, entering: Callable[[int], None]) -> None:
        self._buckets: list[Bucket] = []
        self._entering = entering
        self.pace: Callable[[int], None] | None = None
        self.reached: Callable[[], None] | None = None
        self.check: Callable[[], None] | None = None
        self.instead: Callable[[], Any] | None = None
        self.waiting: Callable[[bool], None] = lambda begins: None
        self.wire_bytes = 0
        self._collectives = 0
        self._next = 0
        self._group: Group | None = None
        self._armed = False
        self._pipelined = False  # passes of several micro-batches, of which none has come half way
        self._guarded = False  # gradients that come now belong to a step
        self._expected = False  # and come from a pass that the step was told of
        self._passes = 0
        self._start = 0  # see starts_with; 0 after the first step
        self._flaws = NonFiniteCheck()
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []  # which of them the buckets are made for
        self._hooks: list[RemovableHandle] = []

    def fill(self, parameters: Sequence[nn.Parameter], tail: int = 0, padding: int = 0) -> None:
        """Make the buckets, in the order in which backward comes to them. ``tail``: values at
        the end of the last one, for other use; ``padding``: zeros at the end of each.
        """
        self._parameters = list(parameters)
        self._trained = [parameter.requires_grad for parameter in parameters]
        self._tail_size, self._padded = tail, padding
        trained = [p for p in reversed(parameters) if p.requires_grad]
        self._make = partial(make_buckets, trained, tail, padding)
        self._buckets = self._make()
        middle = trained[len(trained) // 2]
        self.let_go()
        for place, bucket in enumerate(self._buckets):
            for number, parameter in enumerate(bucket.parameters):
                arrived = self._hook(place, number, parameter is middle)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))

    def let_go(self) -> None:
        """The job is over: gradients that come from now on are the script's own. A parameter would
        keep the whole job: what its hooks refer to is not seen by Python's collector.
        """
        while self._hooks:
            self._hooks.pop().remove()

    def new_generation(self, group: Group) -> None:
        """Use this group from now on, and count collectives anew."""
        if self._group is not None and self._group.abandoned:
            # An operation that was given up may still hold the old buffers.
            for bucket in self._buckets:
                bucket.allocate()
        self._group = group
        self._collectives = 0
        self._armed = False

    def starts_with(self, digest: str) -> None:
        """What this rank holds as the generation begins, in hexadecimal digits: a part of it goes
        with the flags of the first step, and ``finish`` raises GenerationLost unless all that hold
        the same have sent the same.
        """
        self._start = 1 + int(digest, 16) % (_EXACT // _FLAG_ROOM - 1) if digest else 0

    @property
    def _started(self) -> float:
        """What this rank started with, as it is added to its flag."""
        return float(_FLAG_ROOM * self._start)

    def _blamed(self, flags: Sequence[float]) -> tuple[int, ...]:
        """Ranks with non-finite values. Raises GenerationLost when those that should hold the same
        did not as the generation began; nothing is applied then.
        """
        first, self._start = self._start > 0, 0
        for shard in range(self._joined().layout.shards) if first else ():
            holders = self._joined().layout.holders(shard)
            if len({int(flags[rank]) // _FLAG_ROOM for rank in holders}) > 1:
                raise GenerationLost("the ranks of this generation began with different states")
        return tuple(rank for rank, flag in enumerate(flags) if int(flag) % _FLAG_ROOM)

    def rehearse(self) -> None:
        """Clear gradients and get ready for a backward pass that is not reduced."""
        self.begin()
        self._guarded = False

    def pin(self) -> None:
        """Have torch allocate now the pinned host memory that gloo uses to reduce the gradients of
        a GPU; torch keeps it.
        """
        flats = [bucket.flat for bucket in self._buckets]
        rooms = [torch.empty_like(flat, device="cpu", pin_memory=True) for flat in flats]
        del rooms  # all of them at once, as in a step

    def begin(self) -> None:
        """Clear gradients and get ready for one backward pass."""
        self._next = 0
        self._passes = 0
        self._armed = self._expected = False
        self._guarded = True
        self._flaws.clear()
        self.wire_bytes = 0
        for bucket in self._buckets:
            bucket.clear()

    def expect(self, *, last: bool = True) -> None:
        """A backward pass of the step comes now; ``last``: no other follows it before ``finish`` or
        ``keep``. Raises RuntimeError when parameters were frozen or unfrozen between two passes of
        a step.
        """
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            if self._passes:
                raise RuntimeError(
                    "parameters were frozen or unfrozen between two backward passes of one step"
                )
            self._refill()
        self._passes += 1
        self._expected, self._armed = True, last
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.here = [False] * len(bucket.parameters)

    def expect_several(self) -> None:
        """Backward passes of several micro-batches come now, in an order that is not known here;
        nothing is reduced before ``finish``.
        """
        self.expect(last=False)
        self._pipelined = True

    def require(self) -> None:
        """The optimizer is about to use the gradients. Raises RuntimeError when they are gone."""
        gone = total = 0
        for bucket in self._buckets:
            total += len(bucket.parameters)
            for place, (parameter, view) in enumerate(
                zip(bucket.parameters, bucket.views, strict=True)
            ):
                if parameter.grad is view:
                    continue
                if parameter.grad is None:
                    gone += 1  # this step leaves it as it is, on all ranks alike
                else:
                    bucket.take(place)
        if gone and gone == total:
            raise RuntimeError(
                "zero_grad() between step.backward() and step.commit() has thrown the gradients"
                " away: leave it out, each step begins with zeros"
            )

    def _refill(self) -> None:
        """Parameters were frozen or unfrozen: make buckets for those that are trained now. What is
        frozen has no gradient, so that the optimizer leaves it as it is.
        """
        check_types(dict(enumerate(self._parameters)))
        self.fill(self._parameters, self._tail_size, self._padded)
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._buckets:
            bucket.clear()

    def _take_all(self) -> None:
        """The backward passes are over: whatever gradient is not in its bucket belongs there.
        Raises RuntimeError.
        """
        self._guarded = self._armed = False
        for bucket in self._buckets:
            for place, (parameter, view) in enumerate(
                zip(bucket.parameters, bucket.views, strict=True)
            ):
                if parameter.grad is view:
                    continue
                if bucket.here[place]:
                    raise RuntimeError(
                        "a hook has replaced a gradient after the job had put it into its bucket:"
                        " register hooks that run after accumulation before job.attach, or use"
                        " tensor.register_hook"
                    )
                bucket.take(place)

    def keep(self, *, rank: int, loss_sum: Amount, count: int) -> None:
        """End a micro-batch that is not this rank's last of the step. Raises RuntimeError where
        there is but one.
        """
        raise RuntimeError("gradients of a step are reduced after one backward pass")

    def finish(self, *, rank: int, loss_sum: Amount, count: int, asks: Asks = NOTHING) -> Reduced:
        """Reduce what is left and wait, once for a GPU. Raises GenerationLost. Gradients are means
        over all samples afterwards.
        """
        raise NotImplementedError

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes. Raises GenerationLost."""
        everyone = self._joined().everyone
        votes = torch.tensor([float(yes)], device=self._buckets[0].flat.device)
        everyone.wait(everyone.start_all_reduce(votes, dist.ReduceOp.MIN))
        return bool(everyone.read(votes)[0])

    def all_finite(self) -> bool:
        """Whether this rank's own gradients, as they are now, are finite."""
        return all(all_finite(bucket.gradients) for bucket in self._buckets)

    def clip(self, grad_norm: float, limit: float) -> None:
        """Scale gradients so that their norm is at most ``limit`` (as
        torch.nn.utils.clip_grad_norm_ does).
        """
        scale = limit / (grad_norm + 1e-6)
        if scale < 1:
            for bucket in self._buckets:
                bucket.gradients.mul_(scale)

    def settle(self, samples: Amount) -> None:
        """Make means of gradients that are sums over so many samples, once."""
        for bucket in self._buckets:
            bucket.gradients.div_(samples)

    def held(self) -> list[Buffers]:
        """The buffers of the step's gradients as they are now; see ``hand_over``."""
        return [bucket.buffers for bucket in self._buckets]

    def hand_over(self, others: Sequence[Buffers]) -> None:
        """Leave the buffers of the step to whoever has asked for them (``held``), and use
        ``others`` from the next ``begin`` on, or new ones where they do not fit.
        """
        for bucket, other in zip_longest(self._buckets, others[: len(self._buckets)]):
            bucket.hand_over(other)

    def broken_off(self) -> bool:
        """The step is not going on. Whether its gradients are complete all the same, but for what
        ``finish`` returns: they are kept then until the next ``begin``, and ``settle`` makes use of
        them.
        """
        self._armed = self._guarded = False
        return False

    def _seal(self, rank: int, loss_sum: Amount, count: int) -> None:
        """Write what is known of the batch just computed behind the last gradients."""
        last = self._buckets[-1]
        self._flaws.look(loss_sum)
        self._flaws.look(last.gradients)
        last.tail[_LOSS] = loss_sum
        last.tail[_COUNT] = count
        last.tail[_FLAGS + rank] = self._flaws.flag()

    def _seal_last(self, rank: int, loss_sum: Amount, count: int, asks: Asks) -> None:
        """The same of the last batch of the step, with what goes along once."""
        self._seal(rank, loss_sum, count)
        tail = self._buckets[-1].tail
        for place, ask in enumerate(asks, start=_ASKS):
            tail[place] = float(ask)  # no copy that a GPU is waited for
        tail[_FLAGS + rank] += self._started

    def _conclude(self) -> Reduced:
        """Make means of the gradients, and read the tail that was reduced with them, and their
        norm. The host waits for a GPU here, and nowhere else in a step. Raises GenerationLost, as
        what an abort leaves looks like any values.
        """
        tail = self._buckets[-1].tail
        self.settle(tail[_COUNT])
        norm = torch.linalg.vector_norm(self._norms())
        *values, last = self._read(torch.cat([tail, norm.view(1)]))
        samples = round(values[_COUNT])
        return Reduced(
            loss=values[_LOSS] / samples,
            samples=samples,
            blamed=self._blamed(values[_FLAGS : _FLAGS + self._joined().world]),
            grad_norm=last,
            asks=heard(values[_ASKS:_FLAGS]),
        )

    def _read(self, values: Tensor) -> list[float]:
        found: list[float] = self._joined().read(values)
        if self.check:
            self.check()
        return found

    def _norms(self) -> Tensor:
        """Of the gradients as they are, one for each bucket."""
        return torch.stack([torch.linalg.vector_norm(bucket.gradients) for bucket in self._buckets])

    def _circle(self) -> Circle | Group:
        """Who reduces the buckets together."""
        return self._joined()

    def _joined(self) -> Group:
        if self._group is None:
            raise RuntimeError("gradients are reduced before any generation was joined")
        return self._group

    def _hook(self, place: int, number: int, is_middle: bool) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if not self._guarded:
                return
            if not self._expected:
                raise RuntimeError(
                    "loss.backward() was called in a step: give the loss to step.backward(loss),"
                    " and parts of it that are computed before the last one to"
                    " step.accumulate(loss)"
                )
            bucket = self._buckets[place]
            bucket.take(number)
            if not self._armed:
                if is_middle and self._pipelined and self.reached:
                    self._pipelined = False
                    self.reached()
                return
            if bucket.here[number]:
                raise RuntimeError(
                    "a gradient came twice in one backward pass, and may have been sent after the"
                    " first time: use torch.utils.checkpoint with use_reentrant=False"
                )
            if self.check:
                self.check()
            if is_middle and self.reached:
                self.reached()
            bucket.here[number] = True
            bucket.missing -= 1
            while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing <= 0:
                self._launch()

        return arrived

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._next < len(self._buckets):
            # Looked at before it is mixed with the others' values: that is how the rank to blame is
            # known.
            self._flaws.look(bucket.gradients)
        bucket.seal()
        circle = self._circle()
        bucket.work = self.enter(
            2 * bucket.flat.nbytes, circle.ranks, lambda: circle.start_all_reduce(bucket.sent)
        )

    def _count(self) -> None:
        self._collectives += 1

    def exchange(
        self,
        circle: Circle,
        ring_bytes: int,
        operation: Callable[[Any], dist.Work],
        *,
        sent: Sequence[Tensor] = (),
        got: Sequence[Tensor] = (),
    ) -> None:
        """Do something besides gradients in a circle, and wait: it is entered, counted and looked
        at as they are. ``ring_bytes``: what each rank would send in a ring without end; ``sent``,
        ``got``: tensors that others get of this rank, and it of them. Raises GenerationLost.
        """
        self.pass_on(sent)
        self.waiting(True)
        circle.wait(self.enter(ring_bytes, circle.ranks, lambda: circle.start(operation)))
        self.waiting(False)
        self.came(got)

    def pass_on(self, sent: Sequence[Tensor]) -> None:
        """Values are about to go to other ranks. Raises GenerationLost if it is too late."""
        if self.check:
            self.check()
        self.goes(sent)

    def await_peer(
        self, circle: Circle, work: Any, got: Sequence[Tensor], land: Callable[[], None]
    ) -> None:
        """Wait for what was begun with one other rank; ``land``: puts it into ``got``. Raises
        GenerationLost.
        """
        self.waiting(True)
        circle.wait(work)
        land()
        self.waiting(False)
        self.came(got)

    def goes(self, sent: Sequence[Tensor]) -> None:
        """Values go to other ranks in the midst of a pass."""

    def came(self, got: Sequence[Tensor]) -> None:
        """And come from them."""

    def enter(
        self, ring_bytes: int, ranks: Sequence[int], start: Callable[[], dist.Work | None]
    ) -> dist.Work | None:
        """Begin a collective of these ranks; ``ring_bytes``: what each would send in a ring without
        end. Raises GenerationLost.
        """
        if self.instead and (other := self.instead()):
            return other  # type: ignore[no-any-return]
        self._count()
        self._entering(self._collectives)
        # In a ring an all-reduce sends each element 2 (n - 1) / n times, a gathering or scattering
        # one half of that (Patarasuk and Yuan, 2009).
        wire = int(ring_bytes * (len(ranks) - 1) / len(ranks))
        self.wire_bytes += wire
        if self.pace:
            self.pace(wire)
        return start()


class GradientReducer(Reducer):
    """Sums the gradients of ``model`` over the ranks and divides by the number of samples."""

    def __init__(
        self, model: nn.Module, *, max_world: int, entering: Callable[[int], None]
    ) -> None:
        super().__init__(entering)
        check_types(dict(model.named_parameters()))
        self.fill(list(model.parameters()), tail=_FLAGS + max_world)

    def finish(self, *, rank: int, loss_sum: Amount, count: int, asks: Asks = NOTHING) -> Reduced:
        self._take_all()
        while self._next < len(self._buckets) - 1:
            self._launch()
        self._seal_last(rank, loss_sum, count, asks)
        self._launch()
        group = self._joined()
        for bucket in self._buckets:
            assert bucket.work is not None
            group.wait(bucket.work)
            bucket.require_sealed()
        return self._conclude()
