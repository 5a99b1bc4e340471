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
