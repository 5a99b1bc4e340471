"""What detectors share: the protocol, the alarm, the rate of false alarms, and blocks of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainchaos.recovery.health.estimates import Block, Blocks, Drop, DropCusum
from trainchaos.recovery.health.readings import Place, Reading

RATE = 0.01
"""False alarms of a detector in an hour of a series (a rank, a device, or the job), at the most:
with 8 ranks one in 12 hours. A warning costs a checkpoint of some seconds, so that this is less
than a thousandth of the time.
"""
STEP_S = 0.04
"""Step time of gpt nano on 2 cores (docs/performance.md): a shorter step means more decisions in
an hour, and has to be said.
"""
MOST_PLACES = 20_000
"""Places that a detector remembers."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """``what`` looks wrong, ``where``, and since when (the time of the first reading that did).
    ``value`` exceeds ``threshold``, both in the detector's unit. ``evidence``: numbers for people.
    """

    what: str
    where: Place
    since_s: float
    value: float
    threshold: float
    evidence: Mapping[str, float | int | str] = field(default_factory=dict)


class Detector(Protocol):
    """Told all readings in the order of their times; those of other metrics are passed over. An
    alarm is raised once, and again only after things were well in between.
    """

    @property
    def what(self) -> str:
        """What it detects."""

    @property
    def rate(self) -> float:
        """False alarms in an hour of one series, at the most, under its null model."""

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms. ``now_s``: for what is seen by nothing being said."""


def tail(rate: float, every_s: float) -> float:
    """Probability of a false alarm that one decision may have, with a decision each ``every_s``: by
    the union bound, whatever the dependence between decisions.
    """
    if not (rate > 0.0 and every_s > 0.0):
        raise ValueError("a rate and a period are more than 0")
    return min(0.5, rate * every_s / 3600.0)


@dataclass(kw_only=True)
class BlockDetector:
    """One that judges each block of time of a metric, once a later one begins."""

    what: str = field(init=False)
    metric: str = field(init=False)
    rate: float = RATE
    _blocks: Blocks = field(init=False, repr=False)

    def look(self, readings: Sequence[Reading], now_s: float) -> Sequence[Alarm]:
        """New alarms."""
        return [
            alarm
            for reading in readings
            if self._takes(reading)
            for block in self._blocks.add(reading)
            for alarm in self._judge(block)
        ]

    def _takes(self, reading: Reading) -> bool:
        return reading.metric == self.metric and reading.value > 0.0

    def _judge(self, block: Block) -> Iterable[Alarm]:
        raise NotImplementedError

    def _alarm(
        self, where: Place, since_s: float, value: float, threshold: float, **evidence: float
    ) -> Alarm:
        return Alarm(
            what=self.what,
            where=where,
            since_s=since_s,
            value=value,
            threshold=threshold,
            evidence=evidence,
        )


@dataclass(kw_only=True)
class DropDetector(BlockDetector):
    """One that finds lasting drops of each place's series of logarithms (``DropCusum``). ``least``:
    the share that has to be lost.
    """

    least: float
    _tail: float = field(init=False, repr=False)
    _sums: dict[Place, DropCusum] = field(default_factory=dict, repr=False)

    def _dropped(self, where: Place, value: float, block: Block) -> Drop | None:
        if where not in self._sums:
            if len(self._sums) >= MOST_PLACES:
                return None
            self._sums[where] = DropCusum(tail=self._tail, least=-math.log1p(-self.least))
        return self._sums[where].add(value, block.start_s)
