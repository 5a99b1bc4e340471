"""When the next failure comes: laws of the time between two failures of a job, seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Law(Protocol):
    """A law of independent times between failures. ``mean_s``: their mean."""

    @property
    def mean_s(self) -> float:
        """The mean time between failures."""

    def survival(self, times_s: Floats) -> Floats:
        """The probability that a time is longer than each of ``times_s``; same shape."""

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """``count`` times."""


@dataclass(frozen=True)
class Poisson:
    """Failures at a constant rate: exponential times."""

    mean_s: float

    def survival(self, times_s: Floats) -> Floats:
        """See Law."""
        return np.exp(-times_s / self.mean_s)

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """See Law."""
        return random.exponential(self.mean_s, count)


@dataclass(frozen=True)
class Weibull:
    """Failures that follow one another more closely (``shape`` below 1), or less (above)."""

    mean_s: float
    shape: float

    @property
    def scale_s(self) -> float:
        """The scale that gives this mean: mean / Gamma(1 + 1 / shape)."""
        return self.mean_s / math.gamma(1 + 1 / self.shape)

    def survival(self, times_s: Floats) -> Floats:
        """See Law."""
        return np.exp(-((times_s / self.scale_s) ** self.shape))

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """See Law."""
        return self.scale_s * random.weibull(self.shape, count)


@dataclass(frozen=True)
class Fixed:
    """A failure each ``mean_s`` seconds, as in a benchmark that kills on a schedule."""

    mean_s: float

    def survival(self, times_s: Floats) -> Floats:
        """See Law."""
        return (times_s < self.mean_s).astype(np.float64)

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """See Law."""
        return np.full(count, self.mean_s)


@dataclass(frozen=True)
class Trace:
    """Times that were observed, drawn again with replacement. ``times_s``: at least one."""

    times_s: Sequence[float]

    @property
    def mean_s(self) -> float:
        """The mean of what was observed."""
        return sum(self.times_s) / len(self.times_s)

    def survival(self, times_s: Floats) -> Floats:
        """See Law."""
        seen = np.sort(np.asarray(self.times_s, dtype=np.float64))
        return 1.0 - np.searchsorted(seen, times_s, side="right") / len(seen)

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """See Law."""
        return random.choice(np.asarray(self.times_s, dtype=np.float64), count)
