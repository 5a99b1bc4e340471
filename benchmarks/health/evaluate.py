"""Plays series to detectors, and counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy

from benchmarks.health.cases import Case
from benchmarks.health.noise import WEATHERS, Rng
from benchmarks.health.streams import Plant
from trainchaos.chaos.stats import poisson_upper
from trainchaos.recovery.health.detector import Alarm


@dataclass(frozen=True, kw_only=True)
class Null:
    """Without an anomaly: ``alarms`` in ``hours`` of series; ``names``: in which weather each
    was.
    """

    alarms: int
    hours: float
    names: Sequence[str] = ()

    @property
    def rate(self) -> float:
        """False alarms in an hour of a series."""
        return self.alarms / self.hours

    @property
    def upper(self) -> float:
        """Upper 95 % bound of the rate (one-sided, Poisson)."""
        return poisson_upper(self.alarms) / self.hours

    @property
    def surely_over(self) -> float:
        """The largest rate that these alarms refute, one-sided, 95 %: a lower bound of the rate."""
        low, high = 0.0, float(self.alarms)
        for _ in range(60):
            mean = (low + high) / 2.0
            below = math.fsum(
                math.exp(k * math.log(mean) - mean - math.lgamma(k + 1.0))
                for k in range(self.alarms)
            )
            low, high = (mean, high) if below > 0.95 else (low, mean)
        return low / self.hours


@dataclass(kw_only=True)
class Planted:
    """Anomalies of one size: ``n`` of them, the ``delays_s`` of those that were found, and the
    alarms that named somebody else or came before.
    """

    n: int = 0
    delays_s: list[float] = field(default_factory=list)
    wrong: int = 0

    @property
    def found(self) -> int:
        """How many."""
        return len(self.delays_s)


def alarms(case: Case, rng: Rng, number: int, seconds: int, plant: Plant | None) -> Iterator[tuple]:
    """(alarm, when it was raised) of one run; its weather goes by its number."""
    detector = case.make()
    weather = WEATHERS[number % len(WEATHERS)]
    for readings, now_s in case.stream(rng, weather, seconds, plant):
        for alarm in detector.look(readings, now_s):
            yield alarm, now_s, weather.name


def null(case: Case, seed: int, hours: float) -> Null:
    """Series of a healthy job."""
    runs = max(1, math.ceil(hours * 3600 / case.run_s / case.series))
    names: list[str] = []
    for number in range(runs):
        rng = numpy.random.default_rng([seed, 0, number])
        names += [name for _, _, name in alarms(case, rng, number, case.run_s, None)]
    return Null(alarms=len(names), hours=runs * case.run_s * case.series / 3600, names=names)


def planted(case: Case, seed: int, size: float, n: int) -> Planted:
    """Runs with one anomaly each."""
    found = Planted()
    kind = list(case.sizes).index(size) + 1
    for number in range(n):
        rng = numpy.random.default_rng([seed, kind, number])
        onset_s = float(rng.integers(*case.onset_s))
        plant = Plant(size=size, onset_s=onset_s)
        first: float | None = None
        for alarm, now_s, _ in alarms(case, rng, number, int(onset_s) + case.watched_s, plant):
            right = _right(case, alarm, plant, now_s)
            found.wrong += not right
            if right and first is None:
                first = now_s - onset_s
        found.n += 1
        if first is not None:
            found.delays_s.append(first)
    return found


def _right(case: Case, alarm: Alarm, plant: Plant, now_s: float) -> bool:
    return now_s >= plant.onset_s and case.right(alarm, plant)
