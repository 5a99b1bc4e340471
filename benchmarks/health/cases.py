"""Which detector is tried on which series, for how long, and with anomalies of which sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks.health import streams
from benchmarks.health.noise import Rng, Weather
from benchmarks.health.streams import RANKS, Plant, Poll
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


def _of_job(alarm: Alarm, plant: Plant) -> bool:
    return True


def _of_one(alarm: Alarm, plant: Plant) -> bool:
    return alarm.where.rank == plant.whose


def _of_first(alarm: Alarm, plant: Plant) -> bool:
    """Of the ranks that are odd, where most are not."""
    few = 2 * plant.size < RANKS
    return alarm.where.rank is not None and alarm.where.rank < plant.size if few else True


def _behind(alarm: Alarm, plant: Plant) -> bool:
    """Of the ranks that stopped, or of the job where all did."""
    return alarm.where.rank is None or alarm.where.rank < plant.size


@dataclass(frozen=True, kw_only=True)
class Case:
    """``series``: of a stream, each of which counts an hour in an hour; ``run_s``: length of one
    run without an anomaly, after which all is begun anew; ``hours``: of series, wanted;
    ``onset_s``: earliest and latest; ``watched_s``: after the onset; ``sizes``: size -> its words;
    ``right``: whether an alarm names whom it should.
    """

    make: Callable[[], Detector]
    stream: Stream
    series: int
    hours: int
    run_s: int
    onset_s: tuple[int, int]
    watched_s: int
    sizes: Mapping[float, str]
    right: Callable[[Alarm, Plant], bool] = _of_job


HOUR = 3600
CASES: Mapping[str, Case] = {
    "straggler": Case(
        make=StragglerDetector,
        stream=streams.ranks,
        series=RANKS,
        hours=328,
        run_s=HOUR,
        onset_s=(60, 120),
        watched_s=60,
        sizes={1.05: "1.05 x", 1.15: "1.15 x", 1.3: "1.3 x", 2.0: "2 x"},
        right=_of_one,
    ),
    "gradient-spike": Case(
        make=gradient_spike,
        stream=streams.gradients,
        series=1,
        hours=330,
        run_s=HOUR,
        onset_s=(60, 120),
        watched_s=20,
        sizes={
            1.5: "1.5 x, 3 steps",
            3.0: "3 x, 3 steps",
            10.0: "10 x, 3 steps",
            -10.0: "10 x, 1 step",
            -100.0: "100 x, 1 step",
        },
    ),
    "loss-spike": Case(
        make=loss_spike,
        stream=streams.losses,
        series=1,
        hours=330,
        run_s=HOUR,
        onset_s=(60, 120),
        watched_s=20,
        sizes={1.1: "+10 %", 1.3: "+30 %", 2.0: "+100 %"},
    ),
    "throughput-drop": Case(
        make=ThroughputDetector,
        stream=streams.throughput,
        series=1,
        hours=330,
        run_s=HOUR,
        onset_s=(90, 150),
        watched_s=120,
        sizes={0.03: "-3 %", 0.07: "-7 %", 0.15: "-15 %", 0.4: "-40 %"},
    ),
    "ecc-acceleration": Case(
        make=EccDetector,
        stream=streams.memory_errors,
        series=RANKS,
        hours=20_000,
        run_s=24 * HOUR,
        onset_s=(2 * HOUR, 4 * HOUR),
        watched_s=HOUR,
        sizes={10.0: "10 x", 50.0: "50 x", 500.0: "500 x"},
        right=_of_one,
    ),
    "thermal-limit": Case(
        make=ThermalDetector,
        stream=streams.temperatures,
        series=RANKS,
        hours=2_000,
        run_s=6 * HOUR,
        onset_s=(400, 500),
        watched_s=1200,
        sizes={0.02: "0.02 degC/s", 0.1: "0.1 degC/s", 0.5: "0.5 degC/s"},
        right=_of_one,
    ),
    "slow-link": Case(
        make=LinkDetector,
        stream=streams.links,
        series=RANKS,
        hours=2_000,
        run_s=6 * HOUR,
        onset_s=(900, 1500),
        watched_s=900,
        sizes={0.05: "-5 %", 0.15: "-15 %", 0.5: "-50 %", 1.0: "-100 %"},
        right=_of_one,
    ),
    "idle-device": Case(
        make=IdleDetector,
        stream=streams.utilisations,
        series=RANKS,
        hours=2_000,
        run_s=6 * HOUR,
        onset_s=(100, 500),
        watched_s=120,
        sizes={0.5: "half of the reads", 0.9: "9 of 10 reads", 1.0: "all reads"},
        right=_of_one,
    ),
    "digest-mismatch": Case(
        make=DigestDetector,
        stream=streams.digests,
        series=RANKS,
        hours=1_000,
        run_s=6 * HOUR,
        onset_s=(10, 60),
        watched_s=20,
        sizes={1.0: "1 of 8 ranks", 3.0: "3 of 8", 4.0: "4 of 8"},
        right=_of_first,
    ),
    "hang": Case(
        make=HangDetector,
        stream=streams.commits,
        series=1,
        hours=330,
        run_s=HOUR,
        onset_s=(30, 60),
        watched_s=20,
        sizes={1.0: "1 of 8 ranks", 8.0: "all ranks"},
        right=_behind,
    ),
}
