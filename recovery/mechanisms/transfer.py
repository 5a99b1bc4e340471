"""Copies the full training state from one rank to those that need it, as tensors; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from recovery.mechanisms.group import Circle, GenerationLost, Group
from recovery.mechanisms.state import TrainState

CHUNK_BYTES = 32 * 1024 * 1024
MAX_SCALAR_BYTES = 1 << 20


def copy_state(
    state: TrainState, group: Group | Circle, *, source: int, receive: bool, progress: Callable[[], None]
) -> None:
    """Copy the state of rank ``source`` to the ranks that pass ``receive``; every rank of the group, or of the circle
    of those that hold the same part, takes part.

    It is a broadcast, in which ranks that need nothing only pass data on: one tree, however many receive. A
    receiver's state is undefined until this returns. ``progress`` is called between chunks. Raises
    GenerationLost when a peer is lost in the middle.
    """
    sending = group.rank == source
    scalars = _share_scalars(state, group, source, sending)
    with torch.no_grad():
        for chunk in _chunks(state):
            sizes = [t.numel() * t.element_size() for t in chunk]
            if sending:
                buffer = torch.cat([t.reshape(-1).view(torch.uint8) for t in chunk])
            else:
                buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=chunk[0].device)
            group.broadcast(buffer, source)
            if receive and not sending:
                for tensor, part in zip(chunk, buffer.split(sizes), strict=True):
                    tensor.copy_(part.view(tensor.dtype).view_as(tensor))
            progress()
    if receive and not sending:
        state.load_scalars(json.loads(scalars))


def _share_scalars(state: TrainState, group: Group | Circle, source: int, sending: bool) -> bytes:
    device = next(iter(state.parts().values())).device
    data = json.dumps(state.scalars()).encode() if sending else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    group.broadcast(size, source)
    if not 0 < int(size) <= MAX_SCALAR_BYTES:
        raise GenerationLost(f"a peer announced {int(size)} bytes of scalars")
    values = list(data) if sending else [0] * int(size)
    scalars = torch.tensor(values, dtype=torch.uint8, device=device)
    group.broadcast(scalars, source)
    return scalars.cpu().numpy().tobytes()


def _chunks(state: TrainState) -> list[list[Tensor]]:
    """The state's tensors grouped into messages of about CHUNK_BYTES, one device each; the same on every
    rank.

    Parts are ordered by element size, so that every slice of a byte buffer is aligned for its dtype.
    """
    tensors = sorted(state.parts().values(), key=lambda t: (str(t.device), -t.element_size()))
    chunks: list[list[Tensor]] = []
    size = CHUNK_BYTES
    for tensor in tensors:
        if size >= CHUNK_BYTES or chunks[-1][0].device != tensor.device:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return chunks
