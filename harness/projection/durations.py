"""Times that vary, seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainchaos.harness.projection.arrivals import Floats

HALVINGS = 60


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A time that varies. ``median_s``, seconds, of which ``least_s`` are always the same; the rest
    is lognormal, with ``sigma`` the standard deviation of its logarithm; 0: it does not vary.
    ``grows``: with the size of the job. ``median_s`` 0: none.
    """

    median_s: float
    sigma: float = 0.0
    least_s: float = 0.0
    grows: bool = True

    @property
    def mean_s(self) -> float:
        """That of a lognormal is median e^(sigma^2 / 2)."""
        return self.least_s + (self.median_s - self.least_s) * math.exp(self.sigma**2 / 2)

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` of them, seconds."""
        varies_s = self.median_s - self.least_s
        if self.sigma == 0.0 or varies_s == 0.0:
            return np.full(count, self.median_s)
        return self.least_s + varies_s * np.exp(self.sigma * random.standard_normal(count))

    def longer(self, by_s: float) -> Duration:
        """Each so many seconds longer, the median and the mean alike."""
        return replace(self, median_s=self.median_s + by_s, least_s=self.least_s + by_s)

    def grown(self, by_s: float) -> Duration:
        """Of a larger job: so many seconds longer, if it grows."""
        return self.longer(by_s) if self.grows else self

    def below(self, time_s: float) -> float:
        """The probability of a time up to this one."""
        varies_s = self.median_s - self.least_s
        if self.sigma == 0.0 or varies_s == 0.0:
            return float(time_s >= self.median_s)
        if time_s <= self.least_s:
            return 0.0
        longer = math.log((time_s - self.least_s) / varies_s)
        return 0.5 * math.erfc(-longer / self.sigma / math.sqrt(2.0))


@dataclass(frozen=True)
class Mixture:
    """One of several times, each with its probability: ``parts``, at least one, which sum to 1."""

    parts: Sequence[tuple[float, Duration]]

    @property
    def mean_s(self) -> float:
        """Of all."""
        return sum(share * one.mean_s for share, one in self.parts)

    @property
    def median_s(self) -> float:
        """Of all, to a part in 2^60 of the longest median."""
        low, high = 0.0, max(one.median_s for _, one in self.parts)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if sum(share * one.below(middle) for share, one in self.parts) < 0.5:
                low = middle
            else:
                high = middle
        return high

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` of them, seconds."""
        which = random.choice(len(self.parts), count, p=[share for share, _ in self.parts])
        found = np.zeros(count)
        for number, (_, one) in enumerate(self.parts):
            found = np.where(which == number, one.sample(random, count), found)
        return found

    def longer(self, by_s: float) -> Mixture:
        """Each so many seconds longer."""
        return Mixture([(share, one.longer(by_s)) for share, one in self.parts])

    def grown(self, by_s: float) -> Mixture:
        """Of a larger job: each that grows is so many seconds longer."""
        return Mixture([(share, one.grown(by_s)) for share, one in self.parts])


Lasting = Duration | Mixture
