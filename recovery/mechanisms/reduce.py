"""Averages gradients over a group that changes: bucketed, overlapping backward, bound to no process group
object.

Gradients live in flat buckets in the reverse order of the parameters, each reduced as soon as its last
gradient is there, as DistributedDataParallel does (Li et al., VLDB 2020); unlike it, nothing has to be
rebuilt when the group changes. The last bucket carries a tail: loss, sample count, wishes and one non-finite
flag a rank, so that all ranks learn of them alike and no extra round is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recovery.mechanisms.group import Group

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


class _Bucket:
    def __init__(self, parameters: list[nn.Parameter], tail: int) -> None:
        self.parameters = parameters
        self.missing = 0
        self.work: dist.Work | None = None
        self._tail = tail
        self.allocate()

    def allocate(self) -> None:
        """Make the flat buffer, and one view of it for each parameter's gradient."""
        first = self.parameters[0]
        size = sum(p.numel() for p in self.parameters)
        self.flat = torch.zeros(size + self._tail, dtype=first.dtype, device=first.device)
        self.gradients, self.tail = self.flat[:size], self.flat[size:]
        pieces = self.gradients.split([p.numel() for p in self.parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]


class GradientReducer:
    """Sums the gradients of ``model`` over the ranks and divides by the number of samples.

    The caller's loss must be a *sum* over its samples; shares may then be uneven. ``entering`` is called with
    a running number before each collective. Optional seams: ``pace`` is called with the bytes about to go
    over this rank's link, ``reached`` in the middle of backward, ``check`` wherever an abort should be
    noticed (it raises GenerationLost), ``instead`` before each collective: it may give work to wait for instead.
    """

    def __init__(self, model: nn.Module, *, max_world: int, entering: Callable[[int], None]) -> None:
        _check_types(model)
        parameters = [p for p in reversed(list(model.parameters())) if p.requires_grad]
        self._buckets = _make_buckets(parameters, _FLAGS + max_world)
        self._entering = entering
        self.pace: Callable[[int], None] | None = None
        self.reached: Callable[[], None] | None = None
        self.check: Callable[[], None] | None = None
        self.instead: Callable[[], Any] | None = None
        self.wire_bytes = 0
        self._collectives = 0
        self._next = 0
        self._world = 1
        self._group: Group | None = None
        self._armed = False
        self._bad = False
        middle = parameters[len(parameters) // 2]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, parameter is middle))

    def new_generation(self, group: Group) -> None:
        """Use this group from now on, and count collectives anew."""
        if self._group is not None and self._group.abandoned:
            # An operation nobody waits for any more may still hold the old buffers.
            for bucket in self._buckets:
                bucket.allocate()
        self._group = group
        self._world = group.world
        self._collectives = 0
        self._armed = False

    def rehearse(self) -> None:
        """Clear gradients and get ready for a backward pass that is not reduced."""
        self.begin()
        self._armed = False

    def begin(self) -> None:
        """Clear gradients and get ready for one backward pass."""
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

    def finish(self, *, rank: int, loss_sum: float, count: int, pause: bool, save: bool = False) -> Reduced:
        """Reduce what is left and wait. Raises GenerationLost. Gradients are means over all samples afterwards."""
        self._armed = False
        last = self._buckets[-1]
        while self._next < len(self._buckets) - 1:
            self._launch()
        bad = self._bad or not math.isfinite(loss_sum) or not _all_finite(last.gradients)
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
        norms = []
        for bucket in self._buckets:
            bucket.gradients.div_(samples)
            norms.append(torch.linalg.vector_norm(bucket.gradients))
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        blamed = tuple(r for r, flag in enumerate(tail[_FLAGS : _FLAGS + self._world]) if flag)
        return Reduced(
            loss=tail[_LOSS] / samples, samples=samples, pause=tail[_PAUSE] > 0, blamed=blamed, grad_norm=norm,
            save=tail[_SAVE] > 0,
        )  # fmt: skip

    def all_finite(self) -> bool:
        """Whether this rank's own gradients, as they are now, are finite."""
        return all(_all_finite(bucket.gradients) for bucket in self._buckets)

    def clip(self, grad_norm: float, limit: float) -> None:
        """Scale gradients so that their norm is at most ``limit`` (as torch.nn.utils.clip_grad_norm_ does)."""
        scale = limit / (grad_norm + 1e-6)
        if scale < 1:
            for bucket in self._buckets:
                bucket.gradients.mul_(scale)

    def _joined(self) -> Group:
        if self._group is None:
            raise RuntimeError("gradients are reduced before any generation was joined")
        return self._group

    def _hook(self, bucket: _Bucket, is_middle: bool) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if not self._armed:
                return
            if self.check:
                self.check()
            if is_middle and self.reached:
                self.reached()
            bucket.missing -= 1
            while self._next < len(self._buckets) - 1 and self._buckets[self._next].missing <= 0:
                self._launch()

        return arrived

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._next < len(self._buckets):
            # Looked at before it is mixed with the others' values: that is how the rank to blame is known.
            self._bad = self._bad or not _all_finite(bucket.gradients)
        if self.instead and (other := self.instead()):
            bucket.work = other
            return
        self._collectives += 1
        self._entering(self._collectives)
        # A ring all-reduce sends each element 2 (n - 1) / n times (Patarasuk and Yuan, 2009).
        wire = int(bucket.flat.numel() * bucket.flat.element_size() * 2 * (self._world - 1) / self._world)
        self.wire_bytes += wire
        if self.pace:
            self.pace(wire)
        bucket.work = self._joined().start_all_reduce(bucket.flat)


def _check_types(model: nn.Module) -> None:
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


def _all_finite(flat: Tensor) -> bool:
    # A finite sum proves that all terms are finite; only an infinite or NaN sum needs the full look.
    return bool(torch.isfinite(flat.sum())) or bool(torch.isfinite(flat).all())


def _make_buckets(parameters: list[nn.Parameter], tail: int) -> list[_Bucket]:
    groups: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        room = size + parameter.numel() * parameter.element_size()
        if groups[-1] and room > BUCKET_BYTES:
            groups.append([])
            room = parameter.numel() * parameter.element_size()
        groups[-1].append(parameter)
        size = room
    return [_Bucket(g, tail if g is groups[-1] else 0) for g in groups]
