"""Digests of parameters, optimizer state and scheduler that read each byte once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """Of parameters, optimizer and scheduler 16 hexadecimal digits each (``by_part``), equal for
    equal bits. One changed bit of any element always changes them, and so does any field of the
    optimizer's parameter groups and the scheduler.

    For each tensor, sums its bytes, read as 8-byte integers, modulo 2**64. Buffers are left out,
    and what the script has registered: both may rightly differ between ranks.
    """
    trained = {f"model.{name}" for name in state.trained}
    parts = {n: t for n, t in state.parts().items() if n in trained or n.startswith("optimizer.")}
    memory = {name: array_of(tensor) for name, tensor in parts.items()}
    waited = iter(numbers(_sum(tensor) for name, tensor in parts.items() if memory[name] is None))
    sums = [next(waited) if own is None else _sum_of(own, progress) for own in memory.values()]
    found: dict[str, list[Any]] = {"parameters": [], "optimizer": [state.rules_of_optimizer()]}
    for (name, tensor), number in zip(parts.items(), sums, strict=True):
        part = "parameters" if name in trained else "optimizer"
        found[part].append((name, tuple(tensor.shape), number))
    texts = {part: repr(values) for part, values in found.items()}
    return by_part(texts | {"scheduler": state.rules_of_scheduler()})


def sampled_digest(state: TrainState) -> str:
    """Of parameters, optimizer and scheduler 16 hexadecimal digits each (``by_part``): of
    everything that is not a tensor, and of VALUES values of each tensor of at most SAMPLED
    parameters.
    """
    with torch.no_grad():
        values = {part: _some(tensors) for part, tensors in state.sampled(SAMPLED).items()}
    values["optimizer"] += state.rules_of_optimizer().encode()
    return by_part(values | {"scheduler": state.rules_of_scheduler()})


def by_part(parts: Mapping[str, str | bytes]) -> str:
    """A digest that tells which part differs: ``recovery.supervise.divergence`` names it."""
    raw = {name: text.encode() if isinstance(text, str) else text for name, text in parts.items()}
    return " ".join(f"{name}:{xxhash.xxh3_64_hexdigest(data)}" for name, data in raw.items())


def _some(tensors: Sequence[Tensor]) -> bytes:
    """VALUES values of each. Waits once for each device."""
    found, waited = [], []
    for tensor in tensors:
        every = -(-tensor.numel() // VALUES) or 1
        array = array_of(tensor)
        if array is not None:
            found.append(array.reshape(-1)[::every].tobytes())
        else:
            waited.append(tensor.reshape(-1)[::every])
    for device in sorted({str(value.device) for value in waited}):
        raw = [
            v.contiguous().view(torch.uint8)
            for v in waited
            if str(v.device) == device and v.numel()
        ]
        found.append(bytes(bytes_of(torch.cat(raw))) if raw else b"")
    return b"".join(found)


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
