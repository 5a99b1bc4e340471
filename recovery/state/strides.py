"""Work on the bytes of a state in strides, so that a caller can show progress however large a
tensor is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

STRIDE_BYTES = 32 << 20
Progress = Callable[[], None]
"""Called after each stride; by any thread."""


def quiet() -> None:
    """Ignores progress."""


def strides(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of one shape that cover them together, each of at most STRIDE_BYTES of the
    first.
    """
    first = tensors[0]
    if first.numel() * first.element_size() <= STRIDE_BYTES or not first.dim():
        yield tensors
        return
    if all(tensor.is_contiguous() for tensor in tensors):
        tensors = tuple(tensor.view(-1) for tensor in tensors)
    row_bytes = first.numel() * first.element_size() // len(tensors[0])
    rows = STRIDE_BYTES // row_bytes
    if not rows:
        for place in range(len(tensors[0])):
            yield from strides(*(tensor[place] for tensor in tensors))
        return
    for start in range(0, len(tensors[0]), rows):
        yield tuple(tensor[start : start + rows] for tensor in tensors)


def copy(into: Tensor, data: Tensor, progress: Progress = quiet) -> None:
    """Copy values, from any device to any."""
    for target, source in strides(into, data):
        target.copy_(source)
        progress()


def on_host(tensor: Tensor, progress: Progress = quiet) -> Tensor:
    """The same values in the host's memory, in order: the tensor itself if that is so already."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    held = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy(held, tensor, progress)
    return held
