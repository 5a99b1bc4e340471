"""The global sample order: a pure function of (seed, epoch, position), the same on every machine and for
any world size.

Each epoch is a permutation of all samples by a four-round Feistel network with cycle walking (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002), so any position is found in constant time, with no
state to save and no list to keep.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

ROUNDS = 4


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Where ``index`` (0 <= index < size) goes in the permutation of ``epoch``. Raises ValueError when out of range."""
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in [0, {size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = seed.to_bytes(8, "big") + epoch.to_bytes(8, "big")
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            digest = hashlib.blake2b(
                bytes((number,)) + right.to_bytes(8, "big"), key=key, digest_size=8
            ).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        index = (left << half) | right
        if index < size:
            return index


def sample_at(position: int, samples: int, seed: int) -> int:
    """The sample id at a global position (from 0); epoch = position // samples."""
    epoch, index = divmod(position, samples)
    return permute(index, samples, seed, epoch)


def batch(step: int, global_batch: int, samples: int, seed: int) -> list[int]:
    """Sample ids of the global batch of ``step`` (from 1), in order."""
    return list(_batch(step, global_batch, samples, seed))


def without(ids: list[int], step: int, skip: Mapping[int, int]) -> list[int]:
    """A batch without the samples that are left out at ``step``; ``skip``: sample -> first step without it."""
    return [sample for sample in ids if skip.get(sample, step + 1) > step]


@lru_cache(maxsize=8192)
def _batch(step: int, global_batch: int, samples: int, seed: int) -> tuple[int, ...]:
    """A pure function that a judge asks of every arm, and a simulation of every rank."""
    first = (step - 1) * global_batch
    return tuple(sample_at(position, samples, seed) for position in range(first, first + global_batch))


def share(rank: int, world: int, global_batch: int) -> range:
    """Which part of the global batch a rank takes: contiguous, sizes differ by at most one, larger ones first."""
    base, extra = divmod(global_batch, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What is computed in one forward and backward pass. ``number``: its place in the global batch, from 0;
    ``samples``: their ids, of which the first ``count`` count (a place without a share gets one that does not)."""

    number: int
    samples: list[int]
    count: int


def micro_batches(
    ids: list[int], *, rank: int, world: int, full: int, shrink: bool = False, elastic: bool = False
) -> list[MicroBatch]:
    """What a rank computes of a global batch. ``full``: ranks of the full job; ``shrink``: the shares of ranks that are
    missing go; ``elastic``: the batch is cut as for the full job, and whoever is there shares the parts."""
    parts = full if shrink or elastic else world
    found = []
    for number in share(rank, world, parts) if elastic else (rank,):
        part = share(number, parts, len(ids))
        samples = ids[part.start : part.stop]
        found.append(MicroBatch(number=number, samples=samples or ids[:1], count=len(samples)))
    return found
