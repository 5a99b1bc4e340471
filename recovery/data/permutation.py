"""A permutation of all samples, found at any position in constant time, with no list to keep.

A four-round Feistel network with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite
Domains", 2002). Its round functions have few values (128 each for 10,000 samples, 65,536 for four
billion), so each is computed once and remembered; long ranges are looked up together.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
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
        if len(indices) < AT_ONCE or not self._tables[0]:
            return [self.at(index) for index in indices]
        import numpy

        if indices[0] < 0 or indices[-1] >= self.size:
            raise ValueError(f"{indices} is not in [0, {self.size})")
        index = numpy.arange(indices.start, indices.stop, indices.step, dtype=numpy.int64)
        outside = numpy.arange(len(index))
        while len(outside):
            left, right = index[outside] >> self._half, index[outside] & self._mask
            for number, table in enumerate(self._tables):
                known = numpy.frombuffer(table, dtype=numpy.intc)
                for value in numpy.unique(right[known[right] < 0]).tolist():
                    self._round(number, value)
                left, right = right, left ^ known[right]
            index[outside] = (left << self._half) | right
            outside = outside[index[outside] >= self.size]
        return [int(value) for value in index.tolist()]

    def indices_of(self, values: Sequence[int]) -> list[int]:
        """Which index goes to each of these."""
        if len(values) < AT_ONCE or not self._tables[0]:
            return [self.index_of(value) for value in values]
        import numpy

        value = numpy.asarray(values, dtype=numpy.int64)
        if value.min() < 0 or value.max() >= self.size:
            raise ValueError(f"values are not in [0, {self.size})")
        outside = numpy.arange(len(value))
        while len(outside):
            left, right = value[outside] >> self._half, value[outside] & self._mask
            for number, table in reversed(list(enumerate(self._tables))):
                known = numpy.frombuffer(table, dtype=numpy.intc)
                for round_of in numpy.unique(left[known[left] < 0]).tolist():
                    self._round(number, round_of)
                left, right = right ^ known[left], left
            value[outside] = (left << self._half) | right
            outside = outside[value[outside] >= self.size]
        return [int(index) for index in value.tolist()]

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
