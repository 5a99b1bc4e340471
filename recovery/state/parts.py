"""A rank's part of a tensor that several ranks hold together (torch's DTensor)."""

from __future__ import annotations

from torch import Tensor


def is_part(tensor: Tensor) -> bool:
    """Whether other ranks hold more of it. Its type is not asked for: that import would be paid for
    without shards.
    """
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; of one that is not sharded, itself."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def spread_as(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` spread over the ranks as ``like`` is; a collective where it is not. The gradient
    of a weight that all ranks hold is a summand of its own on each, where they have cut up what it
    is applied to (``SequenceParallel``).
    """
    if not (is_part(tensor) and is_part(like)) or tensor.placements == like.placements:  # type: ignore[attr-defined]
        return tensor
    moved: Tensor = tensor.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    return moved


def wrapped(part: Tensor, like: Tensor) -> Tensor:
    """``part`` as a tensor that is sharded as ``like`` is, if it is; both share memory."""
    if not is_part(like):
        return part
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        part,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return whole
