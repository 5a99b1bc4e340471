"""A link carries less than its peers carry, and than it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainchaos.recovery.health.detectors.base import MOST_PLACES, RATE, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.blocks import Block, Blocks, of_others
from trainchaos.recovery.health.statistics.cusum import DropCusum

BLOCK_S = 10.0
"""Ten readings of a monitor."""
FLOOR = 1e-3
"""Of the peers' bandwidth: a link that carries less carries nothing."""


@dataclass(kw_only=True)
class LinkDetector:
    """``metric``: a bandwidth, bytes/s. Value: the share of its baseline that is lost; threshold:
    ``least``.

    The baseline is the link's own past, in parts of what its peers carry at the same time: a job
    that sends less makes all links carry less, and is no fault of theirs. Without two peers there
    is no alarm. Null model and threshold of the sum: ``recovery.health.statistics.cusum``.
    ``least``: a tenth; in ring and tree collectives the slowest link sets the pace of all.
    """

    what: str = field(default="slow-link", init=False)
    metric: str = "nvlink_bandwidth_out"
    rate: float = RATE
    least: float = 0.1
    _sums: dict[Place, DropCusum] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._blocks = Blocks(block_s=BLOCK_S, least=3)
        self._tail = tail(self.rate, BLOCK_S)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found: list[Alarm] = []
        for reading in readings:
            if reading.metric == self.metric and reading.value >= 0.0:
                for block in self._blocks.add(reading):
                    found += self._judge(block)
        return found

    def _judge(self, block: Block) -> list[Alarm]:
        found = []
        for where, peers in of_others(block.medians).items():
            if peers <= 0.0:  # nobody sends anything
                continue
            if where not in self._sums:
                if len(self._sums) >= MOST_PLACES:
                    continue
                self._sums[where] = DropCusum(tail=self._tail, least=-math.log1p(-self.least))
            share = math.log(max(FLOOR, block.medians[where] / peers))
            drop = self._sums[where].add(share, block.start_s)
            if drop is not None:
                found.append(
                    Alarm(
                        what=self.what,
                        where=where,
                        since_s=drop.since_s,
                        value=drop.share,
                        threshold=self.least,
                        evidence={
                            "of_peers_before": math.exp(drop.level),
                            "of_peers_now": math.exp(drop.latest),
                            "peers_bytes_per_s": peers,
                            "sum": drop.score,
                            "sum_limit": drop.limit,
                        },
                    )
                )
        return found
