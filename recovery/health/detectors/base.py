"""What all detectors share: the protocol, the alarm, and the rate of false alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainchaos.recovery.health.readings.reading import Place, Reading

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
