"""A device's memory errors become more frequent, or cannot be corrected."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainchaos.chaos.stats import predicted_tail
from trainchaos.recovery.health.detectors.base import MOST_PLACES, RATE, Alarm, tail
from trainchaos.recovery.health.readings.reading import Place, Reading

WINDOW_S = 600.0
LEAST_HISTORY_S = 3600.0
"""An hour before the window: from less, ten minutes cannot be predicted."""
LEAST_EVENTS = 3
MOST_EVENTS = 1024
"""In a window; more are as clear as these."""
COUNTER = "ecc_corrected_volatile"
FACTS = {
    "ecc_uncorrected_volatile": "errors that were not corrected",
    "ecc_double_bit": "a double-bit error event",
    "row_remap_failed": "a row that could not be remapped",
}
"""Any rise of these is an alarm: on a healthy device they stand still."""


@dataclass(kw_only=True)
class _Device:
    count: float
    start_s: float
    last_s: float
    before: int = 0
    window: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    alarmed: bool = False


@dataclass(kw_only=True)
class EccDetector:
    """Value: reads of the last ``WINDOW_S`` that found new corrected errors; threshold: how many
    the device's own history makes as improbable as ``rate`` demands.

    Null model: such reads are a Poisson process of constant, unknown rate. Reads are counted, not
    errors, because errors come in bursts (one bad row answers many accesses), and a burst is one
    event. ``every_s``: between two reads. Uncorrected errors and failed remaps (``FACTS``) are an
    alarm at once.
    """

    what: str = field(default="ecc-acceleration", init=False)
    rate: float = RATE
    every_s: float = 1.0
    _devices: dict[Place, _Device] = field(default_factory=dict, repr=False)
    _facts: dict[tuple[Place, str], float] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._tail = tail(self.rate, self.every_s)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        found = []
        for reading in readings:
            if not (math.isfinite(reading.value) and math.isfinite(reading.time_s)):
                continue
            alarm = None
            if reading.metric == COUNTER:
                alarm = self._corrected(reading)
            elif reading.metric in FACTS:
                alarm = self._fact(reading)
            if alarm is not None:
                found.append(alarm)
        return found

    def _fact(self, reading: Reading) -> Alarm | None:
        key = reading.where, reading.metric
        event = reading.metric == "ecc_double_bit"
        # The first value of a counter is what was there before us; of an event, it has happened.
        first = 0.0 if event or reading.metric == "row_remap_failed" else reading.value
        before = 0.0 if event else self._facts.get(key, first)
        if key in self._facts or len(self._facts) < MOST_PLACES:
            self._facts[key] = reading.value
        if reading.value <= before:
            return None
        return Alarm(
            what="ecc-uncorrected",
            where=reading.where,
            since_s=reading.time_s,
            value=reading.value,
            threshold=before,
            evidence={"metric": reading.metric, "means": FACTS[reading.metric]},
        )

    def _corrected(self, reading: Reading) -> Alarm | None:
        now_s = reading.time_s
        device = self._devices.get(reading.where)
        if device is None or now_s < device.last_s or reading.value < device.count:
            # New; or a clock or a counter that began anew: so does the history.
            if device is not None or len(self._devices) < MOST_PLACES:
                self._devices[reading.where] = _Device(
                    count=reading.value, start_s=now_s, last_s=now_s
                )
            return None
        grew = reading.value > device.count
        device.count, device.last_s = reading.value, now_s
        while device.window and device.window[0] <= now_s - WINDOW_S:
            device.window.popleft()
            device.before += 1
        if not grew:
            device.alarmed = device.alarmed and bool(device.window)
            return None
        device.window.append(now_s)
        span_s = now_s - WINDOW_S - device.start_s
        count = len(device.window)
        if device.alarmed or count < LEAST_EVENTS or span_s < LEAST_HISTORY_S:
            return None
        if predicted_tail(count, device.before, span_s, WINDOW_S) > self._tail:
            return None
        device.alarmed = True
        least = LEAST_EVENTS
        while predicted_tail(least, device.before, span_s, WINDOW_S) > self._tail:
            least += 1
        return Alarm(
            what=self.what,
            where=reading.where,
            since_s=device.window[0],
            value=float(count),
            threshold=float(least),
            evidence={
                "events_before": device.before,
                "span_s": span_s,
                "window_s": WINDOW_S,
                "errors": reading.value,
            },
        )
