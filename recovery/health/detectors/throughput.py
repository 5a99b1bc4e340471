"""The job does less in the same time than it did, and goes on so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainchaos.recovery.health.detectors.base import MOST_PLACES, RATE, STEP_S, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.blocks import Blocks
from trainchaos.recovery.health.statistics.cusum import DropCusum

STEPS = 20


@dataclass(kw_only=True)
class ThroughputDetector:
    """Metric ``throughput``, of each place that reports it. Value: the share of the earlier
    throughput that is lost; threshold: ``least``, or what the noise hides, whichever is more.

    Medians of blocks of ``STEPS`` steps; null model and threshold of the sum:
    ``recovery.health.statistics.cusum``. ``least``: 5 %, about what the same job differs by from
    one day to the next.
    """

    what: str = field(default="throughput-drop", init=False)
    rate: float = RATE
    step_s: float = STEP_S
    least: float = 0.05
    _sums: dict[Place, DropCusum] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        block_s = STEPS * self.step_s
        self._blocks = Blocks(block_s=block_s, least=STEPS // 4, wanted=STEPS)
        self._tail = tail(self.rate, block_s)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found = []
        for reading in readings:
            if reading.metric != "throughput" or not reading.value > 0.0:
                continue
            for block in self._blocks.add(reading):
                for where, value in block.medians.items():
                    alarm = self._add(where, value, block.start_s)
                    if alarm is not None:
                        found.append(alarm)
        return found

    def _add(self, where: Place, value: float, start_s: float) -> Alarm | None:
        if where not in self._sums:
            if len(self._sums) >= MOST_PLACES:
                return None
            self._sums[where] = DropCusum(tail=self._tail, least=-math.log1p(-self.least))
        drop = self._sums[where].add(math.log(value), start_s)
        if drop is None:
            return None
        return Alarm(
            what=self.what,
            where=where,
            since_s=drop.since_s,
            value=drop.share,
            threshold=self.least,
            evidence={
                "before": math.exp(drop.level),
                "now": math.exp(drop.latest),
                "sum": drop.score,
                "sum_limit": drop.limit,
                "blocks": drop.blocks,
            },
        )
