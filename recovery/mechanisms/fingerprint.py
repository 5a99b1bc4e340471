"""A digest of parameters, optimizer state and scheduler that costs one look at each byte."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recovery.mechanisms.digest import numbers, words_of
from recovery.mechanisms.state import TrainState
from recovery.wire import Digest

if TYPE_CHECKING:
    from recovery.job import Job


def fingerprint(state: TrainState) -> str:
    """16 hexadecimal digits, equal for equal bits. One changed bit of any element always changes them, and so does any
    field of the optimizer's parameter groups and the scheduler.

    Of each tensor the sum of its bytes, read as integers of eight, modulo 2**64; buffers are left out, as running
    statistics differ from rank to rank by right.
    """
    trained = {f"model.{name}" for name, _ in state.model.named_parameters()}
    parts = {n: t for n, t in state.parts().items() if n in trained or n.startswith("optimizer.")}
    sums = numbers(_sum(tensor) for tensor in parts.values())
    text = repr([(name, tuple(t.shape), n) for (name, t), n in zip(parts.items(), sums, strict=True)])
    return hashlib.blake2b(f"{text} {state.rules()}".encode(), digest_size=8).hexdigest()


def tell_digest(job: Job, step: int, *, saving: bool) -> None:
    """Send the supervisor a digest of the state after ``step``, if one is due and others hold the same. ``saving``: a
    checkpoint of it is due."""
    every, last = job.config.verify_every, step == job.config.steps
    due = saving if every is None else every > 0 and step % every == 0
    if (due or (last and every != 0)) and job.layout.replicas > 1:
        digest = Digest(generation=job.generation, step=step, digest=fingerprint(job.state))
        job.agent.channel.send(digest)


def _sum(tensor: Tensor) -> Tensor:
    words, rest = words_of(tensor)
    total = words.sum()
    return total + rest.sum(dtype=torch.int64) if rest.numel() else total
