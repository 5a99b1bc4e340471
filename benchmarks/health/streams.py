"""Readings as a monitor gives them: a list each second, of a healthy job or of one in which
something is wrong from some moment on. Its noise is heavy-tailed, autocorrelated and drifting, with
a warm-up, bursts and missing samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy

from trainchaos.recovery.health.readings import JOB, Place, Reading

Array = numpy.ndarray
Rng = numpy.random.Generator


@dataclass(frozen=True, kw_only=True)
class Weather:
    """One sort of null. ``related``: first-order autocorrelation; ``drift``: amplitude of an hourly
    wave, relative; ``missing``: share of samples that are lost; ``bursts``: share of samples at
    which a burst of up to 8 samples begins; ``warm_up``: the first 200 samples are larger, up to
    three times.
    """

    name: str
    related: float = 0.0
    drift: float = 0.0
    missing: float = 0.0
    bursts: float = 0.0
    warm_up: bool = False


WEATHERS = (
    Weather(name="heavy tails"),
    Weather(name="autocorrelated", related=0.5, warm_up=True),
    Weather(name="all at once", related=0.3, drift=0.05, missing=0.02, bursts=0.002, warm_up=True),
)


def student(rng: Rng, n: int, related: float = 0.0) -> Array:
    """Student's t with 3 degrees of freedom, of scale 1, as innovations of an autoregression."""
    noise = rng.standard_t(3, n)
    return related_noise(noise, related)


def related_noise(noise: Array, related: float) -> Array:
    """An autoregression of first order, of the innovations' scale: a sum of as many powers as are
    more than a thousandth.
    """
    if related == 0.0:
        return noise
    total, power, lag = noise.copy(), related, 1
    while power > 1e-3 and lag < len(noise):
        total[lag:] += power * noise[:-lag]
        power, lag = power * related, lag + 1
    return total * numpy.sqrt(1.0 - related * related)


def positive(rng: Rng, n: int, scale: float, weather: Weather, *, slow: bool = True) -> Array:
    """Values around 1, at least 0.05. ``slow``: bursts and warm-up make them larger (times);
    otherwise smaller (rates).
    """
    values = 1.0 + scale * student(rng, n, weather.related)
    if weather.drift:
        phase = rng.uniform(0.0, 2.0 * numpy.pi)
        values *= 1.0 + weather.drift * numpy.sin(
            phase + 2.0 * numpy.pi * numpy.arange(n) / 90_000.0
        )
    factor = numpy.ones(n)
    if weather.bursts:
        for start in numpy.flatnonzero(rng.random(n) < weather.bursts):
            factor[start : start + int(rng.integers(1, 9))] *= rng.uniform(1.1, 3.0)
    if weather.warm_up:
        factor[:200] *= 1.0 + 2.0 * numpy.exp(-numpy.arange(min(n, 200)) / 50.0)
    values = values * factor if slow else values / factor
    return numpy.maximum(values, 0.05)


def kept(rng: Rng, n: int, weather: Weather) -> Array:
    """Which samples are not lost: single ones, and a second of them now and then."""
    there = rng.random(n) >= weather.missing
    if weather.missing:
        for start in numpy.flatnonzero(rng.random(n) < weather.missing / 500.0):
            there[start : start + 25] = False
    return there


STEP_S = 0.04
PER_POLL = 25
RANKS = 8
Poll = tuple[Sequence[Reading], float]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """An anomaly of a size, from ``onset_s`` on, of rank or device ``whose``."""

    size: float
    onset_s: float
    whose: int = 3


DEVICES = [Place(rank, None, f"cuda:{rank}") for rank in range(RANKS)]


def _devices(
    rng: Rng, weather: Weather, second: int, metric: str, values: Iterable[float], unit: str
) -> Poll:
    """What each device says, as far as it is not lost."""
    readings = [
        Reading(where, metric, float(value), unit, float(second))
        for where, value in zip(DEVICES, values, strict=True)
        if not weather.missing or rng.random() >= weather.missing
    ]
    return readings, float(second)


def ranks(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Compute times of 8 ranks whose steps take 3 % more or less (scale), and that differ from
    each other by 2 % for good. ``size``: as many times as long.
    """
    n = seconds * PER_POLL
    lasting = rng.normal(1.0, 0.02, RANKS)
    values = [0.03 * one * positive(rng, n, 0.03, weather) for one in lasting]
    if plant is not None:
        values[plant.whose][int(plant.onset_s / STEP_S) :] *= plant.size
    there = [kept(rng, n, weather) for _ in range(RANKS)]
    yield from _series([Place(rank) for rank in range(RANKS)], "compute", "s", values, there)


def gradients(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Gradient norms with noise of 10 % (scale). ``size``: times the level, for 3 steps; negative:
    for one step alone.
    """
    steps = 3 if plant is None or plant.size > 0 else 1
    yield from _job(rng, weather, seconds, plant, "gradient_norm", 0.1, steps)


def losses(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Losses with noise of 2 % (scale), which fall slowly. ``size``: times the level, for 25
    steps.
    """
    yield from _job(rng, weather, seconds, plant, "loss", 0.02, 25)


def throughput(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Samples/s, from step times with noise of 5 % (scale). ``size``: the share that is lost."""
    n = seconds * PER_POLL
    values = 1000.0 * positive(rng, n, 0.05, weather, slow=False)
    if plant is not None:
        values[int(plant.onset_s / STEP_S) :] *= 1.0 - plant.size
    yield from _series([JOB], "throughput", "samples/s", [values], [kept(rng, n, weather)])


def _job(
    rng: Rng,
    weather: Weather,
    seconds: int,
    plant: Plant | None,
    metric: str,
    scale: float,
    steps: int,
) -> Iterator[Poll]:
    n = seconds * PER_POLL
    # A burst of a loss or a gradient is no noise: it is what is looked for.
    calm = replace(weather, bursts=0.0)
    values = positive(rng, n, scale, calm) * (1.0 + 2.0 / (1.0 + numpy.arange(n) / 2000.0))
    there = kept(rng, n, weather)
    if plant is not None:
        first = int(plant.onset_s / STEP_S)
        values[first : first + steps] *= abs(plant.size)
        there[first : first + steps] = True
    yield from _series([JOB], metric, "1", [values], [there])


def _series(
    places: Sequence[Place],
    metric: str,
    unit: str,
    values: Sequence[numpy.ndarray],
    there: Sequence[numpy.ndarray],
) -> Iterator[Poll]:
    for second in range(len(values[0]) // PER_POLL):
        first = second * PER_POLL
        readings = []
        for where, series, known in zip(places, values, there, strict=True):
            part = series[first : first + PER_POLL].tolist()
            held = known[first : first + PER_POLL].tolist()
            readings += [
                Reading(where, metric, value, unit, (first + i) * STEP_S, first + i)
                for i, value in enumerate(part)
                if held[i]
            ]
        if len(places) > 1:
            readings.sort(key=lambda one: one.time_s)
        yield readings, second + 1.0


def commits(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Steps of 8 ranks; of 2 in a healthy job, in which all commit together, so that more would say
    the same. ``size``: how many ranks stop; the others wait for them after a step.
    """
    # Some more than fit: a job that is done early is not silent.
    n = int(1.2 * seconds * PER_POLL)
    took = STEP_S * positive(rng, n, 0.05, weather)
    times = numpy.cumsum(took)
    first = 0
    for second in range(seconds):
        now_s = second + 1.0
        last = int(numpy.searchsorted(times, now_s))
        readings = []
        for step in range(first, last):
            time_s = float(times[step])
            for rank in range(2 if plant is None else RANKS):
                stopped = plant is not None and time_s >= plant.onset_s
                # Those that did not stop finish the step that they are in.
                late = plant is not None and time_s >= plant.onset_s + took[step]
                if late or (stopped and plant is not None and rank < plant.size):
                    continue
                readings.append(
                    Reading(Place(rank), "committed", float(step + 1), "steps", time_s, step + 1)
                )
        first = last
        yield readings, now_s


def memory_errors(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Counters of corrected errors of 8 devices: from none to 3 events an hour, each of 1 to 50
    errors. ``size``: as many times as often, and once an hour at the least.
    """
    usual = rng.choice([0.0, 0.2, 1.0, 3.0], RANKS)
    counts = numpy.zeros(RANKS)
    chances = numpy.tile(usual, (2, 1))
    if plant is not None:
        chances[1, plant.whose] = plant.size * max(1.0, usual[plant.whose])
    for second in range(seconds):
        late = plant is not None and second >= plant.onset_s
        hits = rng.random(RANKS) < chances[int(late)] / 3600.0
        # Every second that changes nothing looks alike: a tenth of them is enough.
        if not hits.any() and second % 10:
            continue
        counts[hits] += rng.geometric(0.2, int(hits.sum()))
        yield _devices(rng, weather, second, "ecc_corrected_volatile", counts, "errors")


def temperatures(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Eight devices that warm up from 35 degC to levels of 55 to 78, with a limit of 87, noise of
    1 to 2 degC, and a pause of half a minute every ten minutes. ``size``: degC/s by which one
    rises further.
    """
    levels = rng.uniform(55.0, 78.0, RANKS)
    times = numpy.arange(seconds)
    working = (times % 600) >= 30
    load = numpy.zeros(seconds)
    value = 0.0
    for i in range(seconds):  # a heat sink follows the load within a minute
        value += ((1.0 if working[i] else 0.6) - value) / 60.0
        load[i] = value
    yield [Reading(where, "temperature_slowdown", 87.0, "degC", 0.0) for where in DEVICES], 0.0
    noise = rng.normal(0.0, 1.0, (RANKS, seconds))
    degrees = []
    for rank in range(RANKS):
        spread = rng.uniform(1.0, 2.0)
        own = 35.0 + (levels[rank] - 35.0) * load + spread * related_noise(noise[rank], 0.7)
        if plant is not None and rank == plant.whose:
            own += numpy.clip(plant.size * (times - plant.onset_s), 0.0, 90.0 - levels[rank])
        degrees.append(numpy.round(own))
    for second in range(seconds):
        now = [own[second] for own in degrees]
        yield _devices(rng, weather, second, "temperature", now, "degC")


def links(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Bandwidths of 8 devices: a load that all share, which is none in pauses and halves at times,
    and noise of 10 % (scale) of each. ``size``: the share that one loses.
    """
    times = numpy.arange(seconds)
    shared = 1e10 * numpy.where((times % 900) < 20, 0.0, 1.0)
    shared *= numpy.where((times // 1200) % 3 == 1, 0.5, 1.0)
    own = [
        shared * positive(rng, seconds, 0.1, weather, slow=False) * rng.normal(1.0, 0.02)
        for _ in range(RANKS)
    ]
    if plant is not None:
        own[plant.whose][int(plant.onset_s) :] *= 1.0 - plant.size
    there = [kept(rng, seconds, weather) for _ in range(RANKS)]
    for second in range(seconds):
        now_s = float(second)
        yield (
            [
                Reading(where, "nvlink_bandwidth_out", float(own[i][second]), "bytes/s", now_s)
                for i, where in enumerate(DEVICES)
                if there[i][second]
            ],
            now_s,
        )


def utilisations(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Eight devices that are busy, idle alone in 2 % of the reads (and then with probability 1/2
    in the next one too), and idle together in pauses. ``size``: share of the reads in which one is
    idle.
    """
    idle = numpy.zeros(RANKS, dtype=bool)
    for second in range(seconds):
        # In the long run in 2 % of the reads: begins in 1 %, and lasts for two.
        idle = numpy.where(idle, rng.random(RANKS) < 0.5, rng.random(RANKS) < 0.01)
        used = numpy.where(idle, 0.0, rng.integers(60, 101, RANKS))
        if second % 600 < 30:
            used[:] = 0.0
        if plant is not None and second >= plant.onset_s and rng.random() < plant.size:
            used[plant.whose] = 0.0
        yield _devices(rng, weather, second, "utilisation", used, "%")


def digests(rng: Rng, weather: Weather, seconds: int, plant: Plant | None) -> Iterator[Poll]:
    """Digests of 8 ranks after each 25th step, a step apart at the most. ``size``: how many ranks
    differ.
    """
    for second in range(seconds):
        now_s = second + 1.0
        truth = f"{int(rng.integers(1 << 62)):016x}"
        readings = []
        for rank in rng.permutation(RANKS).tolist():
            odd = plant is not None and second >= plant.onset_s and rank < plant.size
            if weather.missing and rng.random() < weather.missing:
                continue
            text = "f" + truth[1:] if odd else "0" + truth[1:]
            readings.append(Reading(Place(rank), "digest", 0.0, "hex", now_s, second, text))
        yield readings, now_s
