"""Averages gradients over a group that changes: bucketed, overlapping backward, bound to no process group
object.

Gradients live in flat buckets in the reverse order of the parameters, each reduced as soon as its last
gradient is there, as DistributedDataParallel does (Li et al., VLDB 2020); unlike it, nothing has to be
rebuilt when the group changes. The last bucket carries a tail: loss, sample count, wishes and one non-finite
flag a rank, so that all ranks learn of them alike and no extra round is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recovery.mechanisms.group import Circle, Group
from recovery.mechanisms.parts import local, wrapped

BUCKET_BYTES = 25 * 1024 * 1024  # the default of DistributedDataParallel
_LOSS, _COUNT, _PAUSE, _SAVE, _FLAGS = range(5)


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """What all ranks know after a reduction. ``loss``: mean over ``samples``; ``blamed``: ranks with
    non-finite values.
    """

    loss: float
    samples: int
    pause: bool
    blamed: tuple[int, ...]
    grad_norm: float
    save: bool = False

    @property
    def finite(self) -> bool:
        """Whether loss and gradients may be applied."""
        return not self.blamed and self.grad_norm == self.grad_norm and abs(self.grad_norm) != float("inf")


class Reducer(Protocol):
    """What a job needs of whoever reduces gradients.

    The caller's loss must be a *sum* over its samples; shares may then be uneven. Optional seams: ``pace`` is called
    with the bytes about to go over this rank's link, ``reached`` in the middle of backward, ``check`` wherever an abort
    should be noticed (it raises GenerationLost), ``instead`` before each collective: it may give work to wait for
    instead.
    """

    pace: Callable[[int], None] | None
    reached: Callable[[], None] | None
    check: Callable[[], None] | None
    instead: Callable[[], Any] | None
    wire_bytes: int

    def new_generation(self, group: Group) -> None:
        """Use this group from now on, and count collectives anew."""

    def rehearse(self) -> None:
        """Clear gradients and get ready for a backward pass that is not reduced."""

    def begin(self) -> None:
        """Clear gradients and get ready for one backward pass."""

    def keep(self, *, rank: int, loss_sum: float, count: int) -> None:
        """End a micro-batch that is not this rank's last of the step. Raises RuntimeError where there is but one."""

    def finish(self, *, rank: int, loss_sum: float, count: int, pause: bool, save: bool = False) -> Reduced:
        """Reduce what is left and wait. Raises GenerationLost. Gradients are means over all samples afterwards."""

    def clip(self, grad_norm: float, limit: float) -> None:
        """Scale gradients so that their norm is at most ``limit`` (as torch.nn.utils.clip_grad_norm_ does)."""

    def all_finite(self) -> bool:
        """Whether this rank's own gradients, as they are now, are finite."""

    def broken_off(self) -> bool:
        """The step is not going on. Whether its gradients are complete all the same, but for what ``finish`` returns:
        they are kept then until the next ``begin``, and ``settle`` makes use of them."""

    def settle(self, samples: int) -> None:
        """Make means of gradients that are sums over so many samples, once."""


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter], tail: int) -> None:
        self.parameters = parameters
        self.missing = 0
        self.work: dist.Work | None = None
        self._tail = tail
        self.allocate()

    def allocate(self) -> None:
        """Make the flat buffer, and one view of it for each parameter's gradient."""
        parts = [local(p) for p in self.parameters]
        size = sum(part.numel() for part in parts)
        self.flat = torch.zeros(size + self._tail, dtype=parts[0].dtype, device=parts[0].device)
        self.gradients, self.tail = self.flat[:size], self.flat[size:]
        pieces = self.gradients.split([part.numel() for part in parts])
        views = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
        self.views = [wrapped(view, p) for view, p in zip(views, self.parameters, strict=True)]


class Buckets:
    """The gradients of some parameters in flat buffers, each reduced as soon as its last gradient is there.

    ``tail``: values at the end of the last one, for other use. ``entering``: called with a running number before each
    collective. The seams are those of ``Reducer``.
    """

    def __init__(self, entering: Callable[[int], None]) -> None:
        self._buckets: list[_Bucket] = []
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
        self._bad = False

    def fill(self, parameters: Sequence[nn.Parameter], tail: int = 0, padding: int = 0) -> None:
        """Make the buckets, in the order in which backward comes to them. ``padding``: zeros at the end of each."""
        trained = [p for p in reversed(parameters) if p.requires_grad]
        self._make = partial(_make_buckets, trained, tail, padding)
        self._buckets = self._make()
        middle = trained[len(trained) // 2]
        for place, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(place, parameter is middle))

    def new_generation(self, group: Group) -> None:
        """See Reducer."""
        if self._group is not None and self._group.abandoned:
            # An operation nobody waits for any more may still hold the old buffers.
            for bucket in self._buckets:
                bucket.allocate()
        self._group = group
        self._collectives = 0
        self._armed = False

    def rehearse(self) -> None:
        """See Reducer."""
        self.begin()
        self._armed = False

    def begin(self) -> None:
        """See Reducer."""
        self._next = 0
        self._armed = True
        self._bad = False
        self.wire_bytes = 0
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing = len(bucket.parameters)
            bucket.work = None
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def keep(self, *, rank: int, loss_sum: float, count: int) -> None:
        """See Reducer."""
        raise RuntimeError("gradients of a step are reduced after one backward pass")

    def all_finite(self) -> bool:
        """See Reducer."""
        return all(all_finite(bucket.gradients) for bucket in self._buckets)

    def clip(self, grad_norm: float, limit: float) -> None:
        """See Reducer."""
        scale = limit / (grad_norm + 1e-6)
        if scale < 1:
            for bucket in self._buckets:
                bucket.gradients.mul_(scale)

    def settle(self, samples: int) -> None:
        """See Reducer."""
        for bucket in self._buckets:
            bucket.gradients.div_(samples)

    def broken_off(self) -> bool:
        """See Reducer."""
        self._armed = False
        return False

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

    def _hook(self, place: int, is_middle: bool) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if not self._armed:
                return
            if self.check:
                self.check()
            if is_middle and self.reached:
                self.reached()
            self._buckets[place].missing -= 1
            while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing <= 0:
                self._launch()

        return arrived

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._next < len(self._buckets):
            # Looked at before it is mixed with the others' values: that is how the rank to blame is known.
            self._bad = self._bad or not all_finite(bucket.gradients)
        circle = self._circle()
        bucket.work = self._enter(
            2 * bucket.flat.nbytes, circle.ranks, lambda: circle.start_all_reduce(bucket.flat)
        )

    def _enter(
        self, ring_bytes: int, ranks: Sequence[int], start: Callable[[], dist.Work | None]
    ) -> dist.Work | None:
        """Begin a collective of these ranks; ``ring_bytes``: what each would send in a ring without end."""
        if self.instead and (other := self.instead()):
            return other  # type: ignore[no-any-return]
        self._collectives += 1
        self._entering(self._collectives)
        # In a ring an all-reduce sends each element 2 (n - 1) / n times, a gathering or scattering one half of
        # that (Patarasuk and Yuan, 2009).
        wire = int(ring_bytes * (len(ranks) - 1) / len(ranks))
        self.wire_bytes += wire
        if self.pace:
            self.pace(wire)
        return start()


class GradientReducer(Buckets):
    """Sums the gradients of ``model`` over the ranks and divides by the number of samples; a ``Reducer``."""

    def __init__(self, model: nn.Module, *, max_world: int, entering: Callable[[int], None]) -> None:
        super().__init__(entering)
        check_types(model)
        self.fill(list(model.parameters()), tail=_FLAGS + max_world)

    def finish(self, *, rank: int, loss_sum: float, count: int, pause: bool, save: bool = False) -> Reduced:
        """Reduce what is left and wait. Raises GenerationLost. Gradients are means over all samples afterwards."""
        self._armed = False
        last = self._buckets[-1]
        while self._next < len(self._buckets) - 1:
            self._launch()
        bad = self._bad or not math.isfinite(loss_sum) or not all_finite(last.gradients)
        last.tail[_LOSS] = loss_sum
        last.tail[_COUNT] = count
        last.tail[_PAUSE] = float(pause)
        last.tail[_SAVE] = float(save)
        last.tail[_FLAGS + rank] = float(bad)
        self._launch()
        group = self._joined()
        for bucket in self._buckets:
            assert bucket.work is not None
            group.wait(bucket.work)
        tail = last.tail.tolist()
        if self.check:
            self.check()  # an aborted NCCL kernel returns with garbage and no error
        samples = round(tail[_COUNT])
        self.settle(samples)
        norm = float(torch.linalg.vector_norm(self._norms()))
        blamed = tuple(r for r, flag in enumerate(tail[_FLAGS : _FLAGS + group.world]) if flag)
        return Reduced(
            loss=tail[_LOSS] / samples, samples=samples, pause=tail[_PAUSE] > 0, blamed=blamed, grad_norm=norm,
            save=tail[_SAVE] > 0,
        )  # fmt: skip


def check_types(model: nn.Module) -> None:
    """One type for all gradients, wide enough for the counts in the tail. Raises TypeError."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise TypeError("the model has no parameter that requires a gradient: there is nothing to train")
    first, device = trained[0][1].dtype, trained[0][1].device
    for name, parameter in trained:
        if parameter.dtype not in (torch.float32, torch.float64) or parameter.dtype != first:
            raise TypeError(
                f"parameter {name} is {parameter.dtype}: gradients are summed in float32 (or all in float64); "
                "keep the parameters so, and use torch.autocast for the forward pass"
            )
        if parameter.device != device:
            raise TypeError(f"parameter {name} is on {parameter.device}, others are on {device}")


def all_finite(flat: Tensor) -> bool:
    """Whether no value is a NaN or an infinity."""
    # A finite sum proves that all terms are finite; only an infinite or NaN sum needs the full look.
    return bool(torch.isfinite(flat.sum())) or bool(torch.isfinite(flat).all())


def _make_buckets(parameters: list[nn.Parameter], tail: int, padding: int) -> list[_Bucket]:
    groups: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        own = local(parameter).nbytes
        room = size + own
        if groups[-1] and room > BUCKET_BYTES:
            groups.append([])
            room = own
        groups[-1].append(parameter)
        size = room
    return [_Bucket(g, padding + (tail if g is groups[-1] else 0)) for g in groups]
