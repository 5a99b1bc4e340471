"""A device does nothing while its peers work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainchaos.recovery.health.detectors.base import RATE, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.blocks import Block, Blocks, of_others

ALONE = 0.02
"""Null model: the share of reads in which a healthy device is idle while its peers work (a late
batch, a log line), at the most,
"""
AGAIN = 0.5
"""and the probability that it still is at the next read."""
IDLE = 5.0
BUSY = 30.0
"""% of utilisation."""


@dataclass(kw_only=True)
class IdleDetector:
    """Metric ``utilisation``, %. Value: reads in a row, ``every_s`` apart, in which it is below
    ``IDLE`` and the median of its peers above ``BUSY``; threshold: as many as a healthy device has
    in a row with the probability that ``rate`` leaves to each read (``ALONE * AGAIN ** (n - 1)``).
    """

    what: str = field(default="idle-device", init=False)
    rate: float = RATE
    every_s: float = 1.0
    _rows: dict[Place, tuple[int, float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._blocks = Blocks(block_s=self.every_s)
        wanted = tail(self.rate, self.every_s)
        self.row = 1 + max(0, math.ceil(math.log(wanted / ALONE) / math.log(AGAIN)))

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found: list[Alarm] = []
        for reading in readings:
            if reading.metric == "utilisation":
                for block in self._blocks.add(reading):
                    found += self._judge(block)
        return found

    def _judge(self, block: Block) -> list[Alarm]:
        found = []
        peers = of_others(block.medians)
        # One that says nothing in a read is neither idle nor at work.
        for where in [one for one in self._rows if one in peers]:
            if block.medians[where] >= IDLE:
                del self._rows[where]
        if len(self._rows) > len(peers):
            self._rows = {where: row for where, row in self._rows.items() if where in peers}
        for where, busy in peers.items():
            if block.medians[where] >= IDLE or busy < BUSY:
                continue
            row, since_s = self._rows.get(where, (0, block.start_s))
            self._rows[where] = row + 1, since_s
            if row + 1 == self.row:
                found.append(
                    Alarm(
                        what=self.what,
                        where=where,
                        since_s=since_s,
                        value=float(row + 1),
                        threshold=float(self.row),
                        evidence={"own": block.medians[where], "peers": busy},
                    )
                )
        return found
