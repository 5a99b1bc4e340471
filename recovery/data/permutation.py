"""A permutation of all samples, found at any position in constant time, with no list to keep.

A four-round Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). Its round functions have few values (128 each for 10,000 samples, 65,536 for four
billion), so each is computed once and remembered; long ranges are looked up together.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

ROUNDS = 4
MAX_TABLE_BITS = 16  # four tables of 2**16 values are 1 MiB; more samples than 2**32 go without
AT_ONCE = 48  # from so many positions on numpy pays


class Permutation:
    """Of the numbers from 0 to ``size`` - 1, by seed and epoch."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._key = seed.to_bytes(8, "big") + epoch.to_bytes(8, "big")
        values = 1 << self._half if self._half <= MAX_TABLE_BITS else 0
        self._tables = [array("i", [-1]) * values for _ in range(ROUNDS)]

    def at(self, index: int) -> int:
        """Where ``index`` (0 <= index < size) goes. Raises ValueError when out of range."""
        if not 0 <= index < self.size:
            raise ValueError(f"index {index} is not in [0, {self.size})")
        while True:
            left, right = index >> self._half, index & self._mask
            for number in range(ROUNDS):
                left, right = right, left ^ self._round(number, right)
            index = (left << self._half) | right
            if index < self.size:
                return index

    def index_of(self, value: int) -> int:
        """Which index goes to ``value``. Raises ValueError when out of range."""
        if not 0 <= value < self.size:
            raise ValueError(f"value {value} is not in [0, {self.size})")
        while True:
            left, right = value >> self._half, value & self._mask
            for number in reversed(range(ROUNDS)):
                left, right = right ^ self._round(number, left), left
            value = (left << self._half) | right
            if value < self.size:
                return value

    def of(self, indices: range) -> list[int]:
        """Where these go, in order."""
        return self._many(indices, self.at, inverse=False)

    def indices_of(self, values: Sequence[int]) -> list[int]:
        """Which index goes to each of these."""
        return self._many(values, self.index_of, inverse=True)

    def _many(
        self, numbers: Sequence[int], one: Callable[[int], int], *, inverse: bool
    ) -> list[int]:
        if len(numbers) < AT_ONCE or not self._tables[0]:
            return [one(number) for number in numbers]
        import numpy

        found = numpy.array(numbers, dtype=numpy.int64)
        if found.min() < 0 or found.max() >= self.size:
            raise ValueError(f"{numbers} are not all in [0, {self.size})")
        outside, tables = numpy.arange(len(found)), list(enumerate(self._tables))
        while len(outside):
            left, right = found[outside] >> self._half, found[outside] & self._mask
            if inverse:  # the other way round is the same with halves and rounds exchanged
                left, right = right, left
            for number, table in reversed(tables) if inverse else tables:
                known = numpy.frombuffer(table, dtype=numpy.intc)
                for value in numpy.unique(right[known[right] < 0]).tolist():
                    self._round(number, value)
                left, right = right, left ^ known[right]
            if inverse:
                left, right = right, left
            found[outside] = (left << self._half) | right
            outside = outside[found[outside] >= self.size]
        return [int(number) for number in found.tolist()]

    def _round(self, number: int, right: int) -> int:
        table = self._tables[number]
        if table and table[right] >= 0:
            return table[right]
        text = bytes((number,)) + right.to_bytes(8, "big")
        digest = hashlib.blake2b(text, key=self._key, digest_size=8).digest()
        value = int.from_bytes(digest, "big") & self._mask
        if table:
            table[right] = value
        return value


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def permutation(size: int, seed: int, epoch: int) -> Permutation:
    """The permutation of an epoch."""
    return Permutation(size, seed, epoch)


def samples_at(positions: range, samples: int, seed: int) -> list[int]:
    """The sample ids at global positions (from 0); epoch = position // samples."""
    found: list[int] = []
    for epoch, part in epochs(positions, samples):
        found += permutation(samples, seed, epoch).of(part)
    return found


def epochs(positions: range, samples: int) -> Iterator[tuple[int, range]]:
    """The epochs of positions that follow each other, each with the indices in it."""
    at = positions.start
    while at < positions.stop:
        epoch, index = divmod(at, samples)
        end = min(positions.stop, (epoch + 1) * samples)
        yield epoch, range(index, index + end - at)
        at = end
