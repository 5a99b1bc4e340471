"""Noise of a healthy job: heavy-tailed, autocorrelated, drifting, with a warm-up, bursts and
missing samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy

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
