"""Laws of times that vary, seconds: between two failures, of a recovery, of a repair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
DRAWN = 100_001


@dataclass(frozen=True)
class Weibull:
    """Independent times between failures, of mean ``mean_s``. ``shape`` 1: a constant rate; below
    1 failures follow one another more closely, above 1 less.
    """

    mean_s: float
    shape: float = 1.0

    @property
    def constant(self) -> bool:
        """Whether failures come at a constant rate."""
        return self.shape == 1.0

    @property
    def scale_s(self) -> float:
        """mean / Gamma(1 + 1 / shape)."""
        return self.mean_s / math.gamma(1 + 1 / self.shape)

    def survival(self, times_s: Floats) -> Floats:
        """The probability that a time is longer than each of ``times_s``."""
        return np.exp(-((times_s / self.scale_s) ** self.shape))

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` times."""
        return self.scale_s * random.weibull(self.shape, count)


@dataclass(frozen=True)
class Trace:
    """Times between failures that were observed, at least one, drawn again with replacement."""

    times_s: Sequence[float]
    constant = False

    @property
    def mean_s(self) -> float:
        """The mean of what was observed."""
        return sum(self.times_s) / len(self.times_s)

    def survival(self, times_s: Floats) -> Floats:
        observed = np.sort(np.asarray(self.times_s, dtype=np.float64))
        return 1.0 - np.searchsorted(observed, times_s, side="right") / len(observed)

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        return random.choice(np.asarray(self.times_s, dtype=np.float64), count)


Law = Weibull | Trace


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A time that varies. ``median_s``, of which ``least_s`` are always the same; the rest is
    lognormal, with ``sigma`` the standard deviation of its logarithm; 0: it does not vary.
    """

    median_s: float
    sigma: float = 0.0
    least_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """That of a lognormal is median e^(sigma^2 / 2)."""
        return self.least_s + (self.median_s - self.least_s) * math.exp(self.sigma**2 / 2)

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` times."""
        varies_s = self.median_s - self.least_s
        if self.sigma == 0.0 or varies_s == 0.0:
            return np.full(count, self.median_s)
        return self.least_s + varies_s * np.exp(self.sigma * random.standard_normal(count))

    def longer(self, by_s: float) -> Duration:
        """Each so many seconds longer, the median and the mean alike."""
        return replace(self, median_s=self.median_s + by_s, least_s=self.least_s + by_s)


@dataclass(frozen=True)
class Mixture:
    """One of several times, each with its probability: ``parts``, at least one, which sum to 1."""

    parts: Sequence[tuple[float, Duration]]

    @property
    def mean_s(self) -> float:
        """Of all."""
        return sum(share * part.mean_s for share, part in self.parts)

    @property
    def median_s(self) -> float:
        """Of all, as of so many that are drawn."""
        return float(np.median(self.sample(np.random.default_rng(0), DRAWN)))

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` times."""
        which = random.choice(len(self.parts), count, p=[share for share, _ in self.parts])
        drawn = np.array([part.sample(random, count) for _, part in self.parts])
        return drawn[which, np.arange(count)]


Lasting = Duration | Mixture
