"""Which detector is tried on which series, for how long, and with anomalies of which sizes; and
what it makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy

from benchmarks.health import streams
from benchmarks.health.streams import RANKS, WEATHERS, Plant, Poll, Rng, Weather
from trainchaos.chaos.stats import poisson_upper
from trainchaos.recovery.health.detector import Alarm, Detector
from trainchaos.recovery.health.device_detectors import (
    EccDetector,
    IdleDetector,
    LinkDetector,
    ThermalDetector,
)
from trainchaos.recovery.health.job_detectors import (
    DigestDetector,
    HangDetector,
    StragglerDetector,
    ThroughputDetector,
    gradient_spike,
    loss_spike,
)

Stream = Callable[[Rng, Weather, int, Plant | None], Iterator[Poll]]
HOUR = 3600


def _of_job(alarm: Alarm, plant: Plant) -> bool:
    return True


def _of_one(alarm: Alarm, plant: Plant) -> bool:
    return alarm.where.rank == plant.whose


def _of_first(alarm: Alarm, plant: Plant) -> bool:
    """Of the ranks that are odd, where most are not."""
    few = 2 * plant.size < RANKS
    return not few or (alarm.where.rank is not None and alarm.where.rank < plant.size)


def _behind(alarm: Alarm, plant: Plant) -> bool:
    """Of the ranks that stopped, or of the job where all did."""
    return alarm.where.rank is None or alarm.where.rank < plant.size


@dataclass(frozen=True)
class Case:
    """``series``: of a stream, each of which counts an hour in an hour; ``run_s``: length of one
    run without an anomaly, after which all is begun anew; ``hours``: of series, wanted;
    ``onset_s``: earliest and latest; ``watched_s``: after the onset; ``sizes``: size -> its words;
    ``right``: whether an alarm names whom it should.
    """

    make: Callable[[], Detector]
    stream: Stream
    sizes: Mapping[float, str]
    series: int
    hours: int
    onset_s: tuple[int, int]
    watched_s: int
    run_s: int = HOUR
    right: Callable[[Alarm, Plant], bool] = _of_job


SPIKES = {1.5: "1.5 x, 3 steps", 3.0: "3 x, 3 steps", 10.0: "10 x, 3 steps"}
SPIKES |= {-10.0: "10 x, 1 step", -100.0: "100 x, 1 step"}
SLOWER = {1.05: "1.05 x", 1.15: "1.15 x", 1.3: "1.3 x", 2.0: "2 x"}
LOSSES = {1.1: "+10 %", 1.3: "+30 %", 2.0: "+100 %"}
DROPS = {0.03: "-3 %", 0.07: "-7 %", 0.15: "-15 %", 0.4: "-40 %"}
ERRORS = {10.0: "10 x", 50.0: "50 x", 500.0: "500 x"}
DEGREES = {0.02: "0.02 degC/s", 0.1: "0.1 degC/s", 0.5: "0.5 degC/s"}
LINKS = {0.05: "-5 %", 0.15: "-15 %", 0.5: "-50 %", 1.0: "-100 %"}
IDLE = {0.5: "half of the reads", 0.9: "9 of 10 reads", 1.0: "all reads"}
ODD = {1.0: "1 of 8 ranks", 3.0: "3 of 8", 4.0: "4 of 8"}
STOPPED = {1.0: "1 of 8 ranks", 8.0: "all ranks"}
LATE, LONG = (2 * HOUR, 4 * HOUR), 6 * HOUR
CASES: Mapping[str, Case] = {
    "straggler": Case(
        StragglerDetector, streams.ranks, SLOWER, RANKS, 328, (60, 120), 60, right=_of_one
    ),
    "gradient-spike": Case(gradient_spike, streams.gradients, SPIKES, 1, 330, (60, 120), 20),
    "loss-spike": Case(loss_spike, streams.losses, LOSSES, 1, 330, (60, 120), 20),
    "throughput-drop": Case(ThroughputDetector, streams.throughput, DROPS, 1, 330, (90, 150), 120),
    "ecc-acceleration": Case(
        EccDetector,
        streams.memory_errors,
        ERRORS,
        RANKS,
        20_000,
        LATE,
        HOUR,
        run_s=24 * HOUR,
        right=_of_one,
    ),
    "thermal-limit": Case(
        ThermalDetector,
        streams.temperatures,
        DEGREES,
        RANKS,
        2_000,
        (400, 500),
        1200,
        run_s=LONG,
        right=_of_one,
    ),
    "slow-link": Case(
        LinkDetector,
        streams.links,
        LINKS,
        RANKS,
        2_000,
        (900, 1500),
        900,
        run_s=LONG,
        right=_of_one,
    ),
    "idle-device": Case(
        IdleDetector,
        streams.utilisations,
        IDLE,
        RANKS,
        2_000,
        (100, 500),
        120,
        run_s=LONG,
        right=_of_one,
    ),
    "digest-mismatch": Case(
        DigestDetector,
        streams.digests,
        ODD,
        RANKS,
        1_000,
        (10, 60),
        20,
        run_s=LONG,
        right=_of_first,
    ),
    "hang": Case(HangDetector, streams.commits, STOPPED, 1, 330, (30, 60), 20, right=_behind),
}


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
        """The largest rate that these alarms refute, one-sided, 95 %: a lower bound of the rate.
        With it, fewer alarms are as likely as so few or fewer at an upper bound of 95 %.
        """
        return poisson_upper(self.alarms - 1, 0.95) / self.hours if self.alarms else 0.0


@dataclass(kw_only=True)
class Planted:
    """Anomalies of one size: ``n`` of them, the ``delays_s`` of those that were found, and the
    alarms that named somebody else or came before.
    """

    n: int = 0
    delays_s: list[float] = field(default_factory=list)
    wrong: int = 0


def alarms(
    case: Case, rng: Rng, number: int, seconds: int, plant: Plant | None
) -> Iterator[tuple[Alarm, float, str]]:
    """Each alarm of one run, when it was raised, and the weather, which goes by its number."""
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
    found = Planted(n=n)
    kind = list(case.sizes).index(size) + 1
    for number in range(n):
        rng = numpy.random.default_rng([seed, kind, number])
        onset_s = float(rng.integers(*case.onset_s))
        plant = Plant(size=size, onset_s=onset_s)
        delays_s = []
        for alarm, now_s, _ in alarms(case, rng, number, int(onset_s) + case.watched_s, plant):
            if now_s >= onset_s and case.right(alarm, plant):
                delays_s.append(now_s - onset_s)
            else:
                found.wrong += 1
        found.delays_s += delays_s[:1]
    return found
