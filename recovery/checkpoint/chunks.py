"""The state of a rank as chunks: boxes of global tensors, as flat bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainchaos.recovery.state import strides
from trainchaos.recovery.state.digest import own_memory
from trainchaos.recovery.state.strides import Progress, quiet
from trainchaos.recovery.state.typed import name_of

OWN = "own."  # begins the names of what other ranks have of their own, which one rank has alone
SPLIT_BYTES = 1 << 20  # a replicated tensor is split over ranks only when it is larger
SYNC_BYTES = 256 << 20  # copied from a GPU between two waits for it


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a named tensor. ``shape``: of the whole tensor; ``at``, ``size``: the box in it, one
    number a dimension; ``data``: the box itself, a live reference; ``replicated``: every rank holds
    the same; ``learned``: a NaN or an infinity in it is an error.
    """

    name: str
    shape: tuple[int, ...]
    at: tuple[int, ...]
    size: tuple[int, ...]
    data: Tensor
    replicated: bool = False
    learned: bool = True

    @property
    def bytes(self) -> int:
        """Of the box."""
        return self.data.numel() * self.data.element_size()

    @property
    def dtype(self) -> str:
        """As the manifest names it, such as ``float32``."""
        return name_of(self.data.dtype)


def chunks_of(tensors: Mapping[str, Tensor], learned: Collection[str] | None = None) -> list[Chunk]:
    """This rank's part of each tensor, in the given order: of a DTensor its local shard, else all
    of it. ``learned``: those that have to be finite; default: all.
    """
    chunks = [_chunk(name, tensor) for name, tensor in tensors.items()]
    return (
        chunks if learned is None else [replace(one, learned=one.name in learned) for one in chunks]
    )


def _chunk(name: str, tensor: Tensor) -> Chunk:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Chunk(
            name=name,
            shape=shape,
            at=(0,) * len(shape),
            size=shape,
            data=tensor.detach(),
            replicated=not name.startswith(OWN),
        )
    size, at = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    local = tensor.to_local().detach()
    replicated = all(placement.is_replicate() for placement in tensor.placements)
    return Chunk(
        name=name, shape=shape, at=tuple(at), size=tuple(size), data=local, replicated=replicated
    )


def share(chunks: Sequence[Chunk], writer: int, writers: int) -> list[Chunk]:
    """The chunks that ``writer`` of ``writers`` writes: of a replicated tensor its rows (small ones
    go to the first), of a sharded one all it holds.
    """
    mine = []
    for chunk in chunks:
        if not chunk.replicated or writers == 1:
            mine.append(chunk)
        elif chunk.bytes <= SPLIT_BYTES or chunk.size[0] < writers:
            mine += [chunk] if writer == 0 else []
        else:
            first, last = (chunk.size[0] * n // writers for n in (writer, writer + 1))
            at, size = (first, *chunk.at[1:]), (last - first, *chunk.size[1:])
            mine.append(replace(chunk, at=at, size=size, data=chunk.data[first:last]))
    return [chunk for chunk in mine if chunk.bytes]


def flat(tensor: Tensor) -> Tensor | None:
    """The bytes of a tensor as a view of its memory, None where they are not contiguous."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.is_contiguous() else None


def on_host(tensor: Tensor, progress: Progress = quiet) -> memoryview:
    """The bytes of a tensor: its own memory if that is on the host and contiguous, else a copy."""
    own = own_memory(tensor)
    if own is not None:
        return own
    bytes_ = strides.on_host(tensor, progress).reshape(-1).view(torch.uint8)
    return memoryview(bytes_.numpy().data) if bytes_.numel() else memoryview(b"")


def not_finite(chunk: Chunk, progress: Progress = quiet) -> bool:
    """Whether it holds a NaN or an infinity by error."""
    data = chunk.data
    if not chunk.learned or not (data.is_floating_point() or data.is_complex()):
        return False
    for (part,) in strides.strides(data):
        # A finite sum proves it; only an infinite or NaN sum needs the full look.
        if not bool(torch.isfinite(part.sum())) and not bool(torch.isfinite(part).all()):
            return True
        progress()
    return False


def first_not_finite(chunks: Sequence[Chunk], progress: Progress = quiet) -> str | None:
    """Name of the first chunk that is not finite, None: all are."""
    return next((chunk.name for chunk in chunks if not_finite(chunk, progress)), None)


def copy_into(
    memory: Tensor, chunks: Sequence[Chunk], offsets: Sequence[int], progress: Progress = quiet
) -> list[Chunk]:
    """Copies of the chunks in these bytes of host memory, where what comes from a GPU may still be
    under way for SYNC_BYTES at the most. ``progress``: called every 32 MB.
    """
    copies, since = [], 0
    for chunk, offset in zip(chunks, offsets, strict=True):
        into = memory[offset : offset + chunk.bytes].view(chunk.data.dtype).view(chunk.data.shape)
        for target, source in strides.strides(into, chunk.data):
            target.copy_(source, non_blocking=True)
            since += source.numel() * source.element_size()
            if since >= SYNC_BYTES:
                await_copies(chunks)
                since = 0
            progress()
        copies.append(replace(chunk, data=into))
    return copies


def await_copies(chunks: Sequence[Chunk]) -> None:
    """Wait until what comes from a GPU is there."""
    for device in {chunk.data.device for chunk in chunks if chunk.data.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def described(chunks: Sequence[Chunk]) -> dict[str, dict[str, Any]]:
    """The manifest's table of tensors, without places: name -> dtype and shape."""
    return {chunk.name: {"dtype": chunk.dtype, "shape": list(chunk.shape)} for chunk in chunks}


def placed(
    chunks: Sequence[Chunk], offsets: Sequence[int], tensors: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The manifest's table of ``tensors``, with the places of the chunks in a stream: {"at",
    "size", "offset"}.
    """
    table = {name: {**entry, "chunks": []} for name, entry in tensors.items()}
    for chunk, offset in zip(chunks, offsets, strict=True):
        place = {"at": list(chunk.at), "size": list(chunk.size), "offset": offset}
        table[chunk.name]["chunks"].append(place)
    return table
