"""Digests of tensors where they are: what is on a GPU is hashed there, and eight bytes of each come
to the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor

from trainchaos.recovery.state import strides
from trainchaos.recovery.state.finite import on_host
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.state.strides import Progress, quiet

WORDS = 1 << 22  # hashed at once on a GPU; several times their 32 MiB are needed for it
# of numpy's
_PLAIN = frozenset((torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8))
# odd, from Steele's splitmix64
_PLACE, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


class Digester:
    """Collects tensors by part, and digests them in the order in which they came."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)

    def add(self, part: str, name: str, tensor: Tensor) -> None:
        """A tensor belongs to a part."""
        here = local(tensor)
        self._parts[part].append((name, here.detach() if here.requires_grad else here))

    def digests(self, progress: Progress = quiet) -> dict[str, str]:
        """16 hexadecimal digits of each part. Waits once for each GPU. ``progress``: called every
        32 MB.
        """
        every = [
            tensor for found in self._parts.values() for _, tensor in found if not on_host(tensor)
        ]
        sums = iter(numbers(mixed(tensor) for tensor in every))
        digests = {}
        for part, found in self._parts.items():
            digest = xxhash.xxh3_64()
            for name, tensor in found:
                digest.update(name.encode())
                held = (
                    _bytes_of(tensor)
                    if on_host(tensor)
                    else next(sums).to_bytes(8, "little", signed=True)
                )
                raw, stride = memoryview(held).cast("B"), strides.STRIDE_BYTES
                for start in range(0, len(raw), stride):
                    digest.update(raw[start : start + stride])
                    progress()
            digests[part] = digest.hexdigest()
        return digests


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's raw bytes (copied to the CPU when it lives elsewhere); of a sharded one this
    rank's part.
    """
    return _bytes_of(local(tensor).detach())


def array_of(part: Tensor) -> numpy.ndarray[Any, Any] | None:
    """A tensor's own memory as an array; None where it is not on the host, or not in order. A state
    has many small tensors, and each call of torch's takes longer than to copy or to add up one.
    """
    if part.dtype in _PLAIN and part.is_cpu and part.is_contiguous() and not part.requires_grad:
        return part.numpy()  # type: ignore[no-any-return]
    return None


def own_memory(part: Tensor) -> memoryview | None:
    """The same as bytes, to be read or written."""
    array = array_of(part)
    if array is None:
        return None
    # Of an empty one, as a rank's shard of a small tensor may be, too: ``b""`` cannot be written,
    # not even nothing.
    return memoryview(array.data).cast("B") if array.size else memoryview(bytearray())


def _bytes_of(part: Tensor) -> memoryview:
    own = own_memory(part)
    if own is not None:
        return own
    flat = part.cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def mixed(tensor: Tensor) -> Tensor:
    """An integer of 64 bits on the tensor's device, not waited for, that depends on each of its
    bits and their places.

    Each word of eight bytes is mixed with its place by a bijection, so that one word that differs
    always shows.
    """
    words, rest = words_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), WORDS):
        some = words[start : start + WORDS]
        places = torch.arange(start, start + len(some), dtype=torch.int64, device=words.device)
        value = some + places.mul_(_PLACE)
        value ^= value >> 29  # the sign goes along: a bijection all the same
        value *= _MIX
        value ^= value >> 32
        total += value.sum()
    for place, byte in enumerate(rest.unbind()):
        total += (byte.to(torch.int64) + 1) * (_MIX + 2 * place)
    return total


def words_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of a tensor as integers of eight bytes, and up to seven that are left."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    raw = flat.view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()  # eight bytes at a time need their place
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64), raw[whole:]


def numbers(scalars: Iterable[Tensor]) -> list[int]:
    """The values of tensors of one integer each, in order. Waits once for each device."""
    every = list(scalars)
    found = [0] * len(every)
    for device in dict.fromkeys(scalar.device for scalar in every):
        places = [place for place, scalar in enumerate(every) if scalar.device == device]
        values = torch.stack([every[place] for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            found[place] = int(value)
    return found
