"""Copies the full training state from one rank to those that need it, as tensors; nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from recovery.mechanisms.group import GenerationLost
from recovery.mechanisms.state import TrainState

CHUNK_BYTES = 32 * 1024 * 1024
MAX_SCALAR_BYTES = 1 << 20


def copy_state(
    state: TrainState, *, rank: int, source: int, receivers: Sequence[int], progress: Callable[[], None]
) -> None:
    """Take part in copying the state of ``source`` to each of ``receivers``; other ranks return at once.

    A receiver's state is undefined until this returns. ``progress`` is called between chunks. Raises GenerationLost when
    a peer is lost in the middle.
    """
    try:
        if rank == source:
            for receiver in receivers:
                _send(state, receiver, progress)
        elif rank in receivers:
            _receive(state, source, progress)
    except (RuntimeError, ValueError) as error:
        raise GenerationLost(f"state transfer broke off: {str(error).splitlines()[0][:200]}") from error


def _send(state: TrainState, receiver: int, progress: Callable[[], None]) -> None:
    scalars = torch.frombuffer(bytearray(json.dumps(state.scalars()).encode()), dtype=torch.uint8)
    dist.send(torch.tensor([scalars.numel()], dtype=torch.int64), receiver)
    dist.send(scalars, receiver)
    for chunk in _chunks(state):
        dist.send(torch.cat([t.reshape(-1).view(torch.uint8) for t in chunk]), receiver)
        progress()


def _receive(state: TrainState, source: int, progress: Callable[[], None]) -> None:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    if not 0 < int(size) <= MAX_SCALAR_BYTES:
        raise ValueError(f"a peer announced {int(size)} bytes of scalars")
    scalars = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(scalars, source)
    with torch.no_grad():
        for chunk in _chunks(state):
            sizes = [t.numel() * t.element_size() for t in chunk]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=chunk[0].device)
            dist.recv(buffer, source)
            for tensor, part in zip(chunk, buffer.split(sizes), strict=True):
                tensor.copy_(part.view(tensor.dtype).view_as(tensor))
            progress()
    state.load_scalars(json.loads(scalars.numpy().tobytes()))


def _chunks(state: TrainState) -> list[list[Tensor]]:
    """The state's tensors grouped into messages of about CHUNK_BYTES, one device each; the same on every rank.

    Parts are ordered by element size, so that every slice of a byte buffer is aligned for its dtype.
    """
    tensors = sorted(state.tensors().values(), key=lambda t: (str(t.device), -t.element_size()))
    chunks: list[list[Tensor]] = []
    size = CHUNK_BYTES
    for tensor in tensors:
        if size >= CHUNK_BYTES or chunks[-1][0].device != tensor.device:
            chunks.append([])
            size = 0
        chunks[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return chunks
