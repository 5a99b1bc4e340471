"""Samples that a job leaves out, and from which step on: sent to each process once, and found in a
batch without checking each sample.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from trainchaos.recovery.data.permutation import epochs, permutation

MAX_TABLES = 2  # a batch may lie in two epochs
_Table = tuple["array[int]", "array[int]"]


class ExclusionIndex(Mapping[int, int]):
    """Sample -> first step without it. For each epoch of a batch, the places of all excluded
    samples are looked up once.
    """

    def __init__(self, since: Mapping[int, int] | None = None) -> None:
        self._since = dict(since or {})
        self._tables: dict[tuple[int, int, int], _Table] = {}

    def __getitem__(self, sample: int) -> int:
        return self._since[sample]

    def __iter__(self) -> Iterator[int]:
        return iter(self._since)

    def __len__(self) -> int:
        return len(self._since)

    def add(self, more: Mapping[int, int]) -> None:
        """Leave these out too."""
        if more:
            self._since.update(more)
            self._tables.clear()

    def places(self, step: int, positions: range, samples: int, seed: int) -> list[int]:
        """Where in ``positions``, the global batch of ``step``, are excluded samples, in order."""
        found: list[int] = []
        for epoch, part in epochs(positions, samples) if self._since else ():
            where, since = self._table(samples, seed, epoch)
            for number in range(bisect_left(where, part.start), bisect_left(where, part.stop)):
                if since[number] <= step:
                    found.append(epoch * samples + where[number])
        return found

    def _table(self, samples: int, seed: int, epoch: int) -> _Table:
        """All excluded samples of an epoch, by their place in it: places, and the first step
        without each.
        """
        key = samples, seed, epoch
        table = self._tables.get(key)
        if table is None:
            known = [sample for sample in self._since if 0 <= sample < samples]
            places = permutation(samples, seed, epoch).indices_of(known)
            both = sorted(zip(places, (self._since[sample] for sample in known), strict=True))
            table = (
                array("q", (place for place, _ in both)),
                array("q", (since for _, since in both)),
            )
            while len(self._tables) >= MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = table
        return table
