"""Digests of parameters, optimizer state and scheduler that read each byte once."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor

from trainchaos.recovery.state import strides
from trainchaos.recovery.state.digest import array_of, bytes_of, numbers, words_of
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import Progress, quiet

SAMPLED = 10  # parameters whose values and slots enter the digest at a generation's start
VALUES = 16  # per tensor; each tensor costs one wait for memory


def fingerprint(state: TrainState, progress: Progress = quiet) -> str:
    """16 hexadecimal digits, equal for equal bits. One changed bit of any element always changes
    them, and so does any field of the optimizer's parameter groups and the scheduler.

    For each tensor, sums its bytes, read as 8-byte integers, modulo 2**64. Buffers are left out:
    running statistics legitimately differ between ranks.
    """
    trained = {f"model.{name}" for name in state.trained}
    parts = {n: t for n, t in state.parts().items() if n in trained or n.startswith("optimizer.")}
    memory = {name: array_of(tensor) for name, tensor in parts.items()}
    waited = iter(numbers(_sum(tensor) for name, tensor in parts.items() if memory[name] is None))
    sums = [next(waited) if own is None else _sum_of(own, progress) for own in memory.values()]
    text = repr(
        [(name, tuple(t.shape), n) for (name, t), n in zip(parts.items(), sums, strict=True)]
    )
    return hashlib.blake2b(f"{text} {state.rules()}".encode(), digest_size=8).hexdigest()


def sampled_digest(state: TrainState) -> str:
    """16 hexadecimal digits of everything that is not a tensor, and of VALUES values of each tensor
    of at most SAMPLED parameters.
    """
    found = xxhash.xxh3_64(state.rules().encode())
    with torch.no_grad():
        values = []
        for tensor in state.sampled(SAMPLED):
            every = -(-tensor.numel() // VALUES) or 1
            array = array_of(tensor)
            if array is not None:
                found.update(array.reshape(-1)[::every].tobytes())
            else:
                values.append(tensor.reshape(-1)[::every])
        for device in sorted({str(value.device) for value in values}):
            raw = [
                v.contiguous().view(torch.uint8)
                for v in values
                if str(v.device) == device and v.numel()
            ]
            found.update(bytes_of(torch.cat(raw)) if raw else b"")  # one wait for the device
    return found.hexdigest()


def _sum(tensor: Tensor) -> Tensor:
    words, rest = words_of(tensor)
    total = words.sum()
    return total + rest.sum(dtype=torch.int64) if rest.numel() else total


def _sum_of(array: numpy.ndarray[Any, Any], progress: Progress) -> int:
    """As ``_sum``, for memory of the host."""
    raw = array.reshape(-1).view(numpy.uint8)
    whole = len(raw) // 8 * 8
    total, stride = int(raw[whole:].sum(dtype=numpy.int64)), strides.STRIDE_BYTES
    for start in range(0, whole, stride):
        total += int(raw[start : min(start + stride, whole)].view(numpy.int64).sum())
        progress()
    return (total + 2**63) % 2**64 - 2**63
