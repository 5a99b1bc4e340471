"""A device comes near the temperature at which it slows itself down."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from trainchaos.recovery.health.detectors.base import MOST_PLACES, RATE, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.blocks import Block, Blocks

BLOCK_S = 5.0
BLOCKS = 12
"""A minute: heat sinks of accelerators follow the load within one to two."""
HORIZON_S = 60.0
MARGIN = 3.0
"""degC below the limit that count as reached: sensors are accurate to about 2, and read whole
degrees.
"""
NEAR = 10.0
"""degC below the limit within which a trend is looked at: a device that warms up from cold rises
fast and levels off.
"""
ROW = 2
RELATED = math.sqrt(3.0)
"""How much more the slope varies than with independent blocks: neighbours of a correlation of 0.5
(1 + r over 1 - r, the root of it).
"""


@dataclass(kw_only=True)
class ThermalDetector:
    """Metric ``temperature`` against ``temperature_slowdown``, degC. Value: the temperature that is
    reached, or will be in ``HORIZON_S`` at the least if it goes on as in the last minute;
    threshold: the limit, less ``MARGIN`` where it is reached.

    Null model: a level more than 8 degC below the limit, normal noise of at most 2 degC, a third
    of it independent from block to block. The slope's lower confidence bound is taken, of the
    probability that ``rate`` leaves to each block.
    """

    what: str = field(default="thermal-limit", init=False)
    rate: float = RATE
    _limits: dict[Place, float] = field(default_factory=dict, repr=False)
    _past: dict[Place, deque[float]] = field(default_factory=dict, repr=False)
    _rows: dict[Place, int] = field(default_factory=dict, repr=False)
    _alarmed: set[Place] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._blocks = Blocks(block_s=BLOCK_S)
        self._sigmas = -NormalDist().inv_cdf(tail(self.rate, BLOCK_S)) * RELATED

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found: list[Alarm] = []
        for reading in readings:
            known = reading.where in self._limits
            if reading.metric == "temperature_slowdown" and reading.value > 0.0:
                if math.isfinite(reading.value) and (known or len(self._limits) < MOST_PLACES):
                    self._limits[reading.where] = reading.value
            elif reading.metric == "temperature" and known:
                for block in self._blocks.add(reading):
                    found += self._judge(block)
        return found

    def _judge(self, block: Block) -> list[Alarm]:
        found = []
        for where, value in block.medians.items():
            limit = self._limits[where]
            past = self._past.setdefault(where, deque(maxlen=BLOCKS))
            past.append(value)
            self._rows[where] = self._rows.get(where, 0) + 1 if value >= limit - MARGIN else 0
            if value < limit - NEAR - MARGIN:
                self._alarmed.discard(where)
            if where in self._alarmed:
                continue
            slope, ahead = self._forecast(list(past))
            near = value >= limit - NEAR and slope > 0.0 and ahead >= limit
            if self._rows[where] >= ROW or near:
                self._alarmed.add(where)
                reached = self._rows[where] >= ROW
                found.append(
                    Alarm(
                        what=self.what,
                        where=where,
                        since_s=block.start_s,
                        value=value if reached else ahead,
                        threshold=limit - MARGIN if reached else limit,
                        evidence={"now": value, "limit": limit, "degC_per_s": slope},
                    )
                )
        return found

    def _forecast(self, values: Sequence[float]) -> tuple[float, float]:
        """Slope by least squares, and the lower bound of the value in ``HORIZON_S``; -inf before
        the window is full.
        """
        n = len(values)
        if n < BLOCKS:
            return 0.0, -math.inf
        times = [BLOCK_S * (i - (n - 1) / 2.0) for i in range(n)]
        squares = math.fsum(t * t for t in times)
        mean = math.fsum(values) / n
        slope = math.fsum(t * v for t, v in zip(times, values, strict=True)) / squares
        residuals = math.fsum(
            (v - mean - slope * t) ** 2 for t, v in zip(times, values, strict=True)
        )
        # Whole degrees: a rounded value is off by 1/sqrt(12) even where the residuals are none.
        error = math.sqrt(max(residuals / (n - 2), 1.0 / 12.0))
        ahead_s = times[-1] + HORIZON_S
        unsure = error * math.sqrt(1.0 / n + ahead_s * ahead_s / squares)
        return slope, mean + slope * ahead_s - self._sigmas * unsure
