"""Times that vary, seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainchaos.harness.projection.arrivals import Floats

HALVINGS = 60


_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def t95(degrees: int) -> float:
    """Student's t for two-sided 95 %, by degrees of freedom from 1 on; beyond 10 of them it is 2.0,
    which is close enough.
    """
    return _T95[degrees - 1] if degrees <= len(_T95) else 2.0


@dataclass(frozen=True, kw_only=True)
class Duration:
    """A time that varies: lognormal with this median, seconds, and the standard deviation of its
    logarithm; 0: always the same. ``median_s`` 0: none.
    """

    median_s: float
    sigma: float = 0.0

    @property
    def mean_s(self) -> float:
        """median e^(sigma^2 / 2)."""
        return self.median_s * math.exp(self.sigma**2 / 2)

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` of them, seconds."""
        if self.sigma == 0.0 or self.median_s == 0.0:
            return np.full(count, self.median_s)
        return self.median_s * np.exp(self.sigma * random.standard_normal(count))

    def longer(self, by_s: float) -> Duration:
        """With a median that is so many seconds longer."""
        return replace(self, median_s=self.median_s + by_s)

    def below(self, time_s: float) -> float:
        """The probability of a time up to this one."""
        if self.sigma == 0.0 or self.median_s == 0.0:
            return float(time_s >= self.median_s)
        if time_s <= 0.0:
            return 0.0
        return 0.5 * math.erfc(-math.log(time_s / self.median_s) / self.sigma / math.sqrt(2.0))


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


Lasting = Duration | Mixture
