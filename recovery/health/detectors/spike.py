"""A value of the job that jumps above its own recent past: what loss and gradient norm share.

Null model: a level that follows a line + noise, the noise an autoregression of first order whose
innovations are Student's t with 3 degrees of freedom. Judged is what is new in a value: its
distance from the level, less what the distance before it leads to expect. Two tests share the rate
of false alarms:

- one step alone: above the quantile of one decision;
- ``steps`` in a row: above the quantile of the probability that, independent, all of them have.

The autocorrelation is taken from the history, two standard errors too high, and a distance below
the level leads to expect nothing: otherwise one large innovation would be in what follows it too,
and a row of its own. (In heavy-tailed sums a row is one big jump: Embrechts, Klüppelberg and
Mikosch, Modelling Extremal Events, 1997, sec. 8.3.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainchaos.chaos.stats import student_quantile
from trainchaos.recovery.health.detectors.base import MOST_PLACES, RATE, STEP_S, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading
from trainchaos.recovery.health.statistics.robust import NU, autocorrelation, spread, without_trend

HISTORY = 512
"""Steps: 20 s of 40 ms, in which the level of a loss does not move by its noise."""
LEAST_HISTORY = 128
REFRESH = 32
"""Steps after which level and scale are computed anew: that takes 0.2 ms, as long as 200 steps'
other work.
"""
WELL = 8
"""Steps below the threshold that end an alarm."""


@dataclass(kw_only=True)
class _Series:
    history: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    waiting: list[float] = field(default_factory=list)
    level: float = 0.0
    scale: float = 0.0
    related: float = 0.0
    row: float = math.inf
    alone: float = math.inf
    distance: float = 0.0
    above: int = 0
    below: int = 0
    since_s: float = 0.0
    alarmed: bool = False
    last_s: float = -math.inf


@dataclass(kw_only=True)
class SpikeDetector:
    """``metric``: of which reading; ``steps``: in a row; ``least``: a spike is at least so much of
    the level (relative), smaller ones are not worth a warning; ``step_s``: of the job. Value and
    threshold are in the metric's unit. A value that is no number is an alarm at once.
    """

    what: str
    metric: str
    rate: float = RATE
    step_s: float = STEP_S
    steps: int = 3
    least: float = 0.2
    _series: dict[Place, _Series] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # Half of the rate for each of the two tests.
        self._one = student_quantile(tail(self.rate / 2.0, self.step_s), NU)
        self._all = student_quantile(tail(self.rate / 2.0, self.step_s) ** (1.0 / self.steps), NU)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found = []
        for reading in readings:
            if reading.metric == self.metric:
                alarm = self._one_more(reading)
                if alarm is not None:
                    found.append(alarm)
        return found

    def _one_more(self, reading: Reading) -> Alarm | None:
        series = self._series.get(reading.where)
        if series is None:
            if len(self._series) >= MOST_PLACES:
                return None
            series = self._series[reading.where] = _Series()
        if not reading.time_s > series.last_s:  # told twice, or the clock was set back
            if reading.time_s <= series.last_s:
                series.last_s = reading.time_s
            return None
        series.last_s = reading.time_s
        value = reading.value
        if not math.isfinite(value):
            return self._above(series, reading, series.level + series.row)
        expected = series.level + series.related * max(0.0, series.distance)
        series.distance = value - series.level
        if value - expected > series.row and series.distance > self.least * abs(series.level):
            alone = value - expected > series.alone
            return self._above(
                series, reading, expected + (series.alone if alone else series.row), alone=alone
            )
        if series.above:
            series.below += 1
            if series.below >= WELL or not series.alarmed:
                series.above, series.below, series.alarmed = 0, 0, False
        self._learn(series, value)
        return None

    def _above(
        self, series: _Series, reading: Reading, threshold: float, *, alone: bool = True
    ) -> Alarm | None:
        if not series.above:
            series.since_s = reading.time_s
        series.above, series.below = series.above + 1, 0
        if math.isfinite(reading.value):
            self._learn(series, reading.value)
        if series.alarmed or not (alone or series.above >= self.steps):
            return None
        series.alarmed = True
        return Alarm(
            what=self.what,
            where=reading.where,
            since_s=series.since_s,
            value=reading.value,
            threshold=threshold,
            evidence={
                "level": series.level,
                "scale": series.scale,
                "steps": series.above,
                "history": len(series.history),
            },
        )

    def _learn(self, series: _Series, value: float) -> None:
        """Values are learned in batches, so that a spike is not its own history before it is
        judged; what lasts for longer than half of the history becomes the level.
        """
        series.waiting.append(value)
        if len(series.waiting) < REFRESH:
            return
        series.history.extend(series.waiting)
        series.waiting.clear()
        if len(series.history) < LEAST_HISTORY:
            return
        level, distances = without_trend(list(series.history))
        # A window of equal values has no scale: rounding alone would be a spike.
        scale = max(spread(distances, 0.0), 1e-9 * abs(level), 1e-12)
        series.level, series.scale = level, scale
        series.related = autocorrelation(distances, 0.0, errors=2.0)
        series.row = scale * self._all
        series.alone = scale * self._one
