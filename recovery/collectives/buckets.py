"""The flat buffers that gradients are reduced in, each for some parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainchaos.recovery.state.parts import local, spread_as, wrapped

BUCKET_BYTES = 25 * 1024 * 1024  # the default of DistributedDataParallel


@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """The memory of a bucket: ``flat``, and views of it: all ``gradients``, the ``tail``, and
    ``views``, each gradient in the shape of its parameter. ``parameters``: the bucket's own list,
    by which buffers are known to fit it.
    """

    flat: Tensor
    gradients: Tensor
    tail: Tensor
    views: list[Tensor]
    parameters: list[nn.Parameter]


class Bucket:
    """``flat``: gradients one after the other, then a tail of ``tail`` values; ``views``: each
    gradient in it.
    """

    def __init__(self, parameters: list[nn.Parameter], tail: int) -> None:
        self.parameters = parameters
        self.missing = 0
        self.here = [False] * len(parameters)  # whose gradient of this pass has come
        self.sealed_at = 0
        self.work: dist.Work | None = None
        self._tail = tail
        self.allocate()

    def allocate(self) -> None:
        """Make the flat buffer, and one view of it for each parameter's gradient."""
        parts = [local(p) for p in self.parameters]
        size = sum(part.numel() for part in parts)
        flat = torch.zeros(size + self._tail, dtype=parts[0].dtype, device=parts[0].device)
        pieces = flat[:size].split([part.numel() for part in parts])
        views = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
        self._use(
            Buffers(
                flat=flat,
                gradients=flat[:size],
                tail=flat[size:],
                views=[wrapped(view, p) for view, p in zip(views, self.parameters, strict=True)],
                parameters=self.parameters,
            )
        )

    def _use(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.flat, self.gradients, self.tail = buffers.flat, buffers.gradients, buffers.tail
        self.views = buffers.views

    def hand_over(self, other: Buffers | None) -> Buffers:
        """Give away the buffers with the gradients in them, and use ``other`` from the next
        ``clear`` on, or new ones where it is None or was made for another bucket.
        """
        given = self.buffers
        if other is not None and other.parameters is self.parameters:
            self._use(other)
        else:
            self.allocate()
        return given

    def clear(self) -> None:
        """Zero gradients, in the parameters too."""
        self.flat.zero_()
        self.missing = len(self.parameters)
        self.here = [False] * len(self.parameters)
        self.work = None
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def take(self, place: int) -> None:
        """Put the gradient of a parameter into the buffer, wherever it was computed:
        ``zero_grad()`` releases the buffer's view, and autograd then makes another tensor.
        """
        parameter, view = self.parameters[place], self.views[place]
        gradient = parameter.grad
        if gradient is not view:
            if gradient is not None:
                local(view).copy_(local(spread_as(gradient.detach(), view)))
            parameter.grad = view

    @property
    def sent(self) -> Tensor:
        """The buffer for a collective: the same memory, with a version of its own. Gloo puts the
        sum of CUDA tensors back by a copy of torch's, which is no change of a gradient.
        """
        return self.flat.data

    def seal(self) -> None:
        """The bucket is about to be reduced."""
        self.sealed_at = self.flat._version

    def require_sealed(self) -> None:
        """Raise RuntimeError if a gradient has changed since ``seal``: some ranks may have sent the
        earlier value.
        """
        if self.flat._version != self.sealed_at:
            raise RuntimeError(
                "a gradient was changed while it was reduced, by a hook that runs after the job's:"
                " use tensor.register_hook, or register_post_accumulate_grad_hook before job.attach"
            )


def check_types(parameters: Mapping[Any, nn.Parameter]) -> None:
    """One type for all gradients, wide enough for the counts in the tail. Raises TypeError."""
    trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
    if not trained:
        raise TypeError(
            "the model has no parameter that requires a gradient: there is nothing to train"
        )
    first, device = trained[0][1].dtype, trained[0][1].device
    for name, parameter in trained:
        if parameter.dtype not in (torch.float32, torch.float64) or parameter.dtype != first:
            raise TypeError(
                f"parameter {name} is {parameter.dtype}: gradients are summed in float32 (or all in"
                " float64); keep the parameters so, and use torch.autocast for the forward pass"
            )
        if parameter.device != device:
            raise TypeError(f"parameter {name} is on {parameter.device}, others are on {device}")


def make_buckets(parameters: list[nn.Parameter], tail: int, padding: int) -> list[Bucket]:
    """Buckets of about BUCKET_BYTES each. ``tail``: of the last one; ``padding``: zeros at the end
    of each.
    """
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
    return [Bucket(g, padding + (tail if g is groups[-1] else 0)) for g in groups]
