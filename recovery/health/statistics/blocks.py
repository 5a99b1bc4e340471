"""Readings of all places in blocks of time, of each of which the median is taken: a burst that is
shorter than half of a block does not show, and neighbouring blocks depend less on each other than
neighbouring readings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.robust import median

MOST_IN_BLOCK = 4096
"""Readings of one place in one block that count; those that come after them are left out."""
MOST_PLACES = 20_000
SHORT = 8
"""Blocks in a row with less than half of the readings that are wanted, after which blocks become
longer: a pause makes two.
"""


@dataclass(frozen=True, kw_only=True)
class Block:
    """``medians`` of the places that had ``least`` readings in it; from ``start_s`` on."""

    start_s: float
    medians: Mapping[Place, float]


@dataclass(kw_only=True)
class Blocks:
    """``block_s``: length; ``least``: readings without which a place has no median; ``wanted``: in
    a block: it becomes longer if no place has half of them (0: it stays as it is).
    """

    block_s: float
    least: int = 1
    wanted: int = 0
    _short: int = 0
    _fullest: int = 0
    _values: dict[Place, list[float]] = field(default_factory=dict, repr=False)
    _index: float = -math.inf

    def add(self, reading: Reading) -> Iterator[Block]:
        """The block before, if this reading is in a later one. A clock that is set back begins a
        new block, and what was in this one is forgotten.
        """
        number = reading.time_s / self.block_s
        if not (math.isfinite(number) and math.isfinite(reading.value)):
            return
        index = math.floor(number)
        if index != self._index:
            if index > self._index and self._values:
                if self._too_short():
                    index = math.floor(reading.time_s / self.block_s)
                else:
                    yield self._close()
            self._values, self._index = {}, index
        values = self._values.get(reading.where)
        if values is None:
            if len(self._values) >= MOST_PLACES:
                return
            values = self._values[reading.where] = []
        if len(values) < MOST_IN_BLOCK:
            values.append(reading.value)

    def _too_short(self) -> bool:
        """Whether the block had not half of what is wanted; then nothing is said of it."""
        most = max(map(len, self._values.values()))
        if 2 * most >= self.wanted:
            self._short = self._fullest = 0
            return False
        self._short, self._fullest = self._short + 1, max(self._fullest, most)
        if self._short >= SHORT:
            self.block_s *= math.ceil(self.wanted / self._fullest)
            self._short = self._fullest = 0
        return True

    def _close(self) -> Block:
        medians = {
            where: median(values)
            for where, values in self._values.items()
            if len(values) >= self.least
        }
        return Block(start_s=self._index * self.block_s, medians=medians)


def of_others(medians: Mapping[Place, float]) -> dict[Place, float]:
    """The median of the other places, for each that has two others at the least: with one, nobody
    could say which of both is the odd one.
    """
    n = len(medians)
    if n < 3:
        return {}
    ordered = sorted(medians, key=medians.__getitem__)
    values = [medians[where] for where in ordered]
    found = {}
    for i, where in enumerate(ordered):
        low, high = (n - 2) // 2, (n - 1) // 2  # of the n - 1 others
        found[where] = (values[low + (low >= i)] + values[high + (high >= i)]) / 2.0
    return found
