"""What looks wrong in what devices say of themselves: memory errors, heat, slow links, idleness."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, linear_regression

from trainchaos.chaos.stats import predicted_tail
from trainchaos.recovery.health.detector import (
    MOST_PLACES,
    RATE,
    Alarm,
    BlockDetector,
    DropDetector,
    tail,
)
from trainchaos.recovery.health.estimates import Block, Blocks, of_others
from trainchaos.recovery.health.readings import Place, Reading

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
    """A device's memory errors become more frequent, or cannot be corrected. Value: reads of the
    last ``WINDOW_S`` that found new corrected errors; threshold: how many the device's own history
    makes as improbable as ``rate`` demands.

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
        return [
            alarm
            for reading in readings
            if math.isfinite(reading.value) and math.isfinite(reading.time_s)
            for alarm in (
                self._corrected(reading) if reading.metric == COUNTER else self._fact(reading)
            )
        ]

    def _fact(self, reading: Reading) -> Iterator[Alarm]:
        key = reading.where, reading.metric
        if reading.metric not in FACTS:
            return
        event = reading.metric == "ecc_double_bit"
        # The first value of a counter is what was there before us; of an event, it has happened.
        first = 0.0 if event or reading.metric == "row_remap_failed" else reading.value
        before = 0.0 if event else self._facts.get(key, first)
        if key in self._facts or len(self._facts) < MOST_PLACES:
            self._facts[key] = reading.value
        if reading.value > before:
            yield Alarm(
                what="ecc-uncorrected",
                where=reading.where,
                since_s=reading.time_s,
                value=reading.value,
                threshold=before,
                evidence={"metric": reading.metric, "means": FACTS[reading.metric]},
            )

    def _corrected(self, reading: Reading) -> Iterator[Alarm]:
        now_s = reading.time_s
        device = self._devices.get(reading.where)
        if device is None or now_s < device.last_s or reading.value < device.count:
            # New; or a clock or a counter that began anew: so does the history.
            if device is not None or len(self._devices) < MOST_PLACES:
                self._devices[reading.where] = _Device(
                    count=reading.value, start_s=now_s, last_s=now_s
                )
            return
        grew = reading.value > device.count
        device.count, device.last_s = reading.value, now_s
        while device.window and device.window[0] <= now_s - WINDOW_S:
            device.window.popleft()
            device.before += 1
        if not grew:
            device.alarmed = device.alarmed and bool(device.window)
            return
        device.window.append(now_s)
        span_s = now_s - WINDOW_S - device.start_s
        count, least = len(device.window), LEAST_EVENTS
        if device.alarmed or count < LEAST_EVENTS or span_s < LEAST_HISTORY_S:
            return
        while least < count and self._probable(least, device, span_s):
            least += 1
        if self._probable(least, device, span_s):
            return
        device.alarmed = True
        yield Alarm(
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

    def _probable(self, count: int, device: _Device, span_s: float) -> bool:
        return predicted_tail(count, device.before, span_s, WINDOW_S) > self._tail


HEAT_BLOCK_S = 5.0
HEAT_BLOCKS = 12
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
HEAT_ROW = 2
RELATED = math.sqrt(3.0)
"""How much more the slope varies than with independent blocks: neighbours of a correlation of 0.5
(1 + r over 1 - r, the root of it).
"""


@dataclass(kw_only=True)
class ThermalDetector(BlockDetector):
    """A device comes near the temperature at which it slows itself down. Metric ``temperature``
    against ``temperature_slowdown``, degC. Value: the temperature that is reached, or will be in
    ``HORIZON_S`` at the least if it goes on as in the last minute; threshold: the limit, less
    ``MARGIN`` where it is reached.

    Null model: a level more than 8 degC below the limit, normal noise of at most 2 degC, a third
    of it independent from block to block. The slope's lower confidence bound is taken, of the
    probability that ``rate`` leaves to each block.
    """

    what: str = field(default="thermal-limit", init=False)
    metric: str = field(default="temperature", init=False)
    _limits: dict[Place, float] = field(default_factory=dict, repr=False)
    _past: dict[Place, deque[float]] = field(default_factory=dict, repr=False)
    _rows: dict[Place, int] = field(default_factory=dict, repr=False)
    _alarmed: set[Place] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._blocks = Blocks(block_s=HEAT_BLOCK_S)
        self._sigmas = -NormalDist().inv_cdf(tail(self.rate, HEAT_BLOCK_S)) * RELATED

    def _takes(self, reading: Reading) -> bool:
        known = reading.where in self._limits
        limit = reading.metric == "temperature_slowdown" and 0.0 < reading.value < math.inf
        if limit and (known or len(self._limits) < MOST_PLACES):
            self._limits[reading.where] = reading.value
        return reading.metric == self.metric and known

    def _judge(self, block: Block) -> Iterator[Alarm]:
        for where, value in block.medians.items():
            limit = self._limits[where]
            past = self._past.setdefault(where, deque(maxlen=HEAT_BLOCKS))
            past.append(value)
            self._rows[where] = self._rows.get(where, 0) + 1 if value >= limit - MARGIN else 0
            if value < limit - NEAR - MARGIN:
                self._alarmed.discard(where)
            if where in self._alarmed:
                continue
            slope, ahead = self._forecast(past)
            near = value >= limit - NEAR and slope > 0.0 and ahead >= limit
            reached = self._rows[where] >= HEAT_ROW
            if reached or near:
                self._alarmed.add(where)
                found = (value, limit - MARGIN) if reached else (ahead, limit)
                facts = {"now": value, "limit": limit, "degC_per_s": slope}
                yield self._alarm(where, block.start_s, *found, **facts)

    def _forecast(self, values: Sequence[float]) -> tuple[float, float]:
        """Slope by least squares, and the lower bound of the value in ``HORIZON_S``; -inf before
        the window is full.
        """
        n = len(values)
        if n < HEAT_BLOCKS:
            return 0.0, -math.inf
        times = [HEAT_BLOCK_S * (i - (n - 1) / 2.0) for i in range(n)]
        slope, mean = linear_regression(times, values)
        squares = math.fsum(t * t for t in times)
        residuals = math.fsum(
            (v - mean - slope * t) ** 2 for t, v in zip(times, values, strict=True)
        )
        # Whole degrees: a rounded value is off by 1/sqrt(12) even where the residuals are none.
        error = math.sqrt(max(residuals / (n - 2), 1.0 / 12.0))
        ahead_s = times[-1] + HORIZON_S
        unsure = error * math.sqrt(1.0 / n + ahead_s * ahead_s / squares)
        return slope, mean + slope * ahead_s - self._sigmas * unsure


LINK_BLOCK_S = 10.0
"""Ten readings of a monitor."""
FLOOR = 1e-3
"""Of the peers' bandwidth: a link that carries less carries nothing."""


@dataclass(kw_only=True)
class LinkDetector(DropDetector):
    """A link carries less than its peers carry, and than it did. Metric: a bandwidth, bytes/s.
    Value: the share of its baseline that is lost; threshold: ``least``.

    The baseline is the link's own past, in parts of what its peers carry at the same time: a job
    that sends less makes all links carry less, and is no fault of theirs. Without two peers there
    is no alarm. ``least``: a tenth; in ring and tree collectives the slowest link sets the pace of
    all.
    """

    what: str = field(default="slow-link", init=False)
    metric: str = field(default="nvlink_bandwidth_out", init=False)
    least: float = 0.1

    def __post_init__(self) -> None:
        self._blocks = Blocks(block_s=LINK_BLOCK_S, least=3)
        self._tail = tail(self.rate, LINK_BLOCK_S)

    def _takes(self, reading: Reading) -> bool:
        return reading.metric == self.metric and reading.value >= 0.0

    def _judge(self, block: Block) -> Iterator[Alarm]:
        for where, peers in of_others(block.medians).items():
            if peers <= 0.0:  # nobody sends anything
                continue
            share = math.log(max(FLOOR, block.medians[where] / peers))
            drop = self._dropped(where, share, block)
            if drop is not None:
                facts = {
                    "of_peers_before": math.exp(drop.level),
                    "of_peers_now": math.exp(drop.latest),
                    "peers_bytes_per_s": peers,
                    "sum": drop.score,
                    "sum_limit": drop.limit,
                }
                yield self._alarm(where, drop.since_s, drop.share, self.least, **facts)


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
class IdleDetector(BlockDetector):
    """A device does nothing while its peers work. Metric ``utilisation``, %. Value: reads in a row,
    ``every_s`` apart, in which it is below ``IDLE`` and the median of its peers above ``BUSY``;
    threshold: as many as a healthy device has in a row with the probability that ``rate`` leaves to
    each read (``ALONE * AGAIN ** (n - 1)``).
    """

    what: str = field(default="idle-device", init=False)
    metric: str = field(default="utilisation", init=False)
    every_s: float = 1.0
    _rows: dict[Place, tuple[int, float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._blocks = Blocks(block_s=self.every_s)
        wanted = tail(self.rate, self.every_s)
        self.row = 1 + max(0, math.ceil(math.log(wanted / ALONE) / math.log(AGAIN)))

    def _takes(self, reading: Reading) -> bool:
        return reading.metric == self.metric

    def _judge(self, block: Block) -> Iterator[Alarm]:
        peers = of_others(block.medians)
        # One that says nothing in a read is neither idle nor at work.
        for where in [one for one in self._rows if one in peers]:
            if block.medians[where] >= IDLE:
                del self._rows[where]
        if len(self._rows) > len(peers):
            self._rows = {where: row for where, row in self._rows.items() if where in peers}
        for where, busy in peers.items():
            own = block.medians[where]
            if own >= IDLE or busy < BUSY:
                continue
            row, since_s = self._rows.get(where, (0, block.start_s))
            self._rows[where] = row + 1, since_s
            if row + 1 == self.row:
                yield self._alarm(where, since_s, self.row, self.row, own=own, peers=busy)
