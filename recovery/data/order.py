"""The global sample order: a pure function of (seed, epoch, position), the same on every machine
and for any world size.

Each epoch is a permutation of all samples (``recovery.data.permutation``), so there is no state to
save, and a rank looks up its own share of a batch alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

from trainchaos.recovery.data.exclusion_index import ExclusionIndex
from trainchaos.recovery.data.permutation import samples_at


def batch(step: int, global_batch: int, samples: int, seed: int) -> list[int]:
    """Sample ids of the global batch of ``step`` (from 1), in order."""
    return list(_batch(step, global_batch, samples, seed))


def without(ids: list[int], step: int, skip: Mapping[int, int]) -> list[int]:
    """A batch without the samples that are excluded at ``step``; ``skip``: sample -> first step
    without it.
    """
    return [sample for sample in ids if skip.get(sample, step + 1) > step]


@lru_cache(maxsize=16)
def _batch(step: int, global_batch: int, samples: int, seed: int) -> tuple[int, ...]:
    """Cached: a judge calls it for every arm, and a simulation for every rank."""
    first = (step - 1) * global_batch
    return tuple(samples_at(range(first, first + global_batch), samples, seed))


class Batch(Sequence[int]):
    """``without(batch(...), ...)``, computed lazily: only requested entries cost time and
    memory.
    """

    def __init__(
        self,
        step: int,
        global_batch: int,
        samples: int,
        seed: int,
        skip: Mapping[int, int] | None = None,
    ) -> None:
        self._samples, self._seed = samples, seed
        first = (step - 1) * global_batch
        self._positions = range(first, first + global_batch)
        left_out = skip if isinstance(skip, ExclusionIndex) else ExclusionIndex(skip)
        self._gone = left_out.places(step, self._positions, samples, seed)

    def __len__(self) -> int:
        return len(self._positions) - len(self._gone)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...

    def __getitem__(self, place: int | slice) -> int | list[int]:
        if isinstance(place, int):
            return self[range(len(self))[place] : range(len(self))[place] + 1][0]
        start, stop, stride = place.indices(len(self))
        if start >= stop:
            return []
        positions = range(self._position(start), self._position(stop - 1) + 1)
        found = samples_at(positions, self._samples, self._seed)
        gone = {position - positions.start for position in self._gone if position in positions}
        return [sample for number, sample in enumerate(found) if number not in gone][::stride]

    def _position(self, place: int) -> int:
        """Position of the sample in that place among the remaining ones."""
        position = self._positions.start + place
        for gone in self._gone:
            if gone > position:
                break
            position += 1
        return position


def share(rank: int, world: int, global_batch: int) -> range:
    """Which part of the global batch a rank takes: contiguous, sizes differ by at most one, larger
    ones first.
    """
    base, extra = divmod(global_batch, world)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def computed_by_any(ids: Sequence[int], *, full: int, shrink: bool) -> list[int]:
    """Those of a global batch that are computed however many of the ``full`` job's ranks are left:
    with ``shrink`` only the first rank's share is.
    """
    part = share(0, full, len(ids)) if shrink else range(len(ids))
    return list(ids[part.start : part.stop])


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The samples of one forward and backward pass. ``number``: its place in the global batch, from
    0; ``samples``: their ids, of which the first ``count`` count (a place without a share gets one
    that does not).
    """

    number: int
    samples: list[int]
    count: int


def micro_batches(
    ids: Sequence[int],
    *,
    rank: int,
    world: int,
    full: int,
    shrink: bool = False,
    elastic: bool = False,
    alike: int = 1,
    counts: bool = True,
) -> list[MicroBatch]:
    """The micro-batches of a global batch that a rank computes. ``full``: ranks of the full job;
    ``shrink``: shares of missing ranks are dropped; ``elastic``: the batch is cut as for the full
    job, and the ranks present share the parts; ``alike``: so many neighbours have one share;
    ``counts``: False where another one of them counts it.
    """
    rank, world, full = (number // alike for number in (rank, world, full))
    parts = full if shrink or elastic else world
    found = []
    for number in share(rank, world, parts) if elastic else (rank,):
        part = share(number, parts, len(ids))
        samples = list(ids[part.start : part.stop])
        found.append(
            MicroBatch(
                number=number,
                samples=samples or list(ids[:1]),
                count=len(samples) if counts else 0,
            )
        )
    return found


def blamed_share(
    samples: Sequence[int], *, rank: int, blamed: Sequence[int], world: int, alike: int, most: int
) -> list[int]:
    """The samples of a rank whose share of the batch is left out for values that are not finite.
    None where the rank is not to blame, where every share would be left out, or more than ``most``
    samples. ``alike`` ranks after one another compute the same share.
    """
    shares = {one // alike for one in blamed}
    named = rank in blamed and len(shares) < world // alike and len(samples) <= most
    return list(samples) if named else []
