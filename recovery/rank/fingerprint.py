"""Digests of parameters, optimizer state and scheduler that read each byte once."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy
import torch
import xxhash
from torch import Tensor

from trainchaos.recovery.policy.interval import compared
from trainchaos.recovery.state import strides
from trainchaos.recovery.state.digest import array_of, bytes_of, numbers, words_of
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.state.strides import Progress, quiet
from trainchaos.recovery.transport.wire import Digest, Joined

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job

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


def starting_digest(job: Job) -> str:
    """Digest of this rank's state at the start of a generation, 16 hexadecimal digits; empty where
    no other rank holds the same state. Covers everything that is not a tensor, and some values of
    each tensor of at most SAMPLED parameters: two different states differ nearly everywhere, and
    reading each byte would delay the start.
    """
    return "" if job.layout.replicas == 1 else sampled_digest(job.state)


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


def tell_joined(job: Job, checkpoint: str | None) -> None:
    """Report to the supervisor that this rank is in the generation, and what it holds.
    ``checkpoint``: the one it restored.
    """
    step, digest = job.state.step, starting_digest(job)
    # The supervisor compares the step as well, and nothing is applied where it differs.
    job.reducer.starts_with(xxhash.xxh3_64_hexdigest(f"{step}/{digest}".encode()) if digest else "")
    message = Joined(generation=job.generation, step=step, checkpoint=checkpoint, digest=digest)
    job.agent.channel.send(message)


def tell_digest(job: Job, step: int, *, saving: bool) -> None:
    """Send the supervisor a digest of the state after ``step``, if one is due and other ranks hold
    the same state. ``saving``: a checkpoint of this step is due.
    """
    due = compared(step, every=job.config.verify_every, steps=job.config.steps, saving=saving)
    if due and job.layout.replicas > 1:
        digest = Digest(
            generation=job.generation, step=step, digest=fingerprint(job.state, job.marks.touch)
        )
        if job.live is not None:
            job.live.feeds.check(step, digest.digest)
        job.agent.digest = digest
        job.agent.channel.send(digest)


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
