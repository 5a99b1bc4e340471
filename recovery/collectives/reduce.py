"""Averages gradients over a group that changes: bucketed, overlapping backward, bound to no process
group object.

Gradients live in flat buckets in the reverse order of the parameters, each reduced as soon as its
last gradient is there, as DistributedDataParallel does (Li et al., VLDB 2020); unlike it, nothing
has to be rebuilt when the group changes. The last bucket carries a tail: loss, sample count, wishes
and one non-finite flag a rank, so that all ranks learn of them alike and no extra round is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainchaos.recovery.collectives.buckets import Bucket, Buffers, check_types, make_buckets
from trainchaos.recovery.collectives.group import Circle, GenerationLost, Group
from trainchaos.recovery.collectives.reducer import NOTHING, Asks, Reduced, heard
from trainchaos.recovery.state.finite import Amount, NonFiniteCheck, all_finite

_LOSS, _COUNT, _ASKS = range(3)
_FLAGS = _ASKS + len(NOTHING)
_EXACT = 1 << 24  # integers below are exact in float32
_FLAG_ROOM = 1 << 10  # flags of a rank's micro-batches add up to less


class Buckets:
    """The gradients of some parameters in flat buffers, each reduced as soon as its last gradient
    is there.

    ``tail``: values at the end of the last one, for other use. ``entering``: called with a running
    number before each collective. The seams are those of ``Reducer``.
    """

    def __init__(self, entering: Callable[[int], None]) -> None:
        self._buckets: list[Bucket] = []
        self._entering = entering
        self.pace: Callable[[int], None] | None = None
        self.reached: Callable[[], None] | None = None
        self.check: Callable[[], None] | None = None
        self.instead: Callable[[], Any] | None = None
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
        """Make the buckets, in the order in which backward comes to them. ``padding``: zeros at the
        end of each.
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
        """See Reducer. A parameter would keep the whole job: what its hooks refer to is not seen by
        Python's collector.
        """
        while self._hooks:
            self._hooks.pop().remove()

    def new_generation(self, group: Group) -> None:
        if self._group is not None and self._group.abandoned:
            # An operation that was given up may still hold the old buffers.
            for bucket in self._buckets:
                bucket.allocate()
        self._group = group
        self._collectives = 0
        self._armed = False

    def starts_with(self, digest: str) -> None:
        self._start = 1 + int(digest, 16) % (_EXACT // _FLAG_ROOM - 1) if digest else 0

    def _with_start(self, flag: Amount) -> Amount:
        """This rank's flag of non-finite values, with what it started with."""
        return flag + float(_FLAG_ROOM * self._start)

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
        self.begin()
        self._guarded = False

    def pin(self) -> None:
        flats = [bucket.flat for bucket in self._buckets]
        rooms = [torch.empty_like(flat, device="cpu", pin_memory=True) for flat in flats]
        del rooms  # all of them at once, as in a step

    def begin(self) -> None:
        self._next = 0
        self._passes = 0
        self._armed = self._expected = False
        self._guarded = True
        self._flaws.clear()
        self.wire_bytes = 0
        for bucket in self._buckets:
            bucket.clear()

    def expect(self, *, last: bool = True) -> None:
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
        self.expect(last=False)
        self._pipelined = True

    def require(self) -> None:
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
        raise RuntimeError("gradients of a step are reduced after one backward pass")

    def all_finite(self) -> bool:
        return all(all_finite(bucket.gradients) for bucket in self._buckets)

    def clip(self, grad_norm: float, limit: float) -> None:
        scale = limit / (grad_norm + 1e-6)
        if scale < 1:
            for bucket in self._buckets:
                bucket.gradients.mul_(scale)

    def settle(self, samples: Amount) -> None:
        for bucket in self._buckets:
            bucket.gradients.div_(samples)

    def held(self) -> list[Buffers]:
        return [bucket.buffers for bucket in self._buckets]

    def hand_over(self, others: Sequence[Buffers]) -> None:
        for bucket, other in zip_longest(self._buckets, others[: len(self._buckets)]):
            bucket.hand_over(other)

    def broken_off(self) -> bool:
        self._armed = self._guarded = False
        return False

    def _conclude(self, tail: Tensor) -> tuple[list[float], float]:
        """Make means of the gradients, and read the tail that was reduced with them, and their
        norm. The host waits for a GPU here, and nowhere else in a step. Raises GenerationLost, as
        what an abort leaves looks like any values.
        """
        self.settle(tail[_COUNT])
        norm = torch.linalg.vector_norm(self._norms())
        *values, last = self._read(torch.cat([tail, norm.view(1)]))
        return values, last

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


class GradientReducer(Buckets):
    """Sums the gradients of ``model`` over the ranks and divides by the number of samples; a
    ``Reducer``.
    """

    def __init__(
        self, model: nn.Module, *, max_world: int, entering: Callable[[int], None]
    ) -> None:
        super().__init__(entering)
        check_types(dict(model.named_parameters()))
        self.fill(list(model.parameters()), tail=_FLAGS + max_world)

    def finish(self, *, rank: int, loss_sum: Amount, count: int, asks: Asks = NOTHING) -> Reduced:
        self._take_all()
        last = self._buckets[-1]
        while self._next < len(self._buckets) - 1:
            self._launch()
        self._flaws.look(loss_sum)
        self._flaws.look(last.gradients)
        last.tail[_LOSS] = loss_sum
        last.tail[_COUNT] = count
        for place, ask in enumerate(asks, start=_ASKS):
            last.tail[place] = float(ask)  # no copy that a GPU is waited for
        last.tail[_FLAGS + rank] = self._with_start(self._flaws.flag())
        self._launch()
        group = self._joined()
        for bucket in self._buckets:
            assert bucket.work is not None
            group.wait(bucket.work)
            bucket.require_sealed()
        tail, norm = self._conclude(last.tail)
        samples = round(tail[_COUNT])
        blamed = self._blamed(tail[_FLAGS : _FLAGS + group.world])
        return Reduced(
            loss=tail[_LOSS] / samples,
            samples=samples,
            blamed=blamed,
            grad_norm=norm,
            asks=heard(tail[_ASKS:_FLAGS]),
        )
