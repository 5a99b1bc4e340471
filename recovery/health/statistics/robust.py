"""Level, trend, scale and autocorrelation of a window: a quarter of wild values moves none far."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

from trainchaos.chaos.stats import student_quantile

NU = 3.0
"""Degrees of freedom of the null model of noise: Student's t with 3 has a finite variance and the
heaviest tail of those with a whole number of degrees that do (P(T > t) ~ 1.1 / t^3). Step times and
gradient norms are heavy-tailed; how heavy differs from job to job, so the model errs to that side.
"""
STUDENT_MAD = student_quantile(0.25, NU)
"""Median absolute deviation of the null model: an observed one, divided by this, is its scale."""
NORMAL_MAD = NormalDist().inv_cdf(0.75)

MAD_ERROR = 1.17
"""Standard error of a median absolute deviation, relative, times the root of n (normal values:
Rousseeuw and Croux 1993, efficiency of 37 %).
"""
SIGN_ERROR = math.pi / 2.0
"""Standard error of ``autocorrelation``, times the root of n, of values without any."""


def median(values: Sequence[float]) -> float:
    """The middle value; nan of none."""
    ordered = sorted(values)
    n = len(ordered)
    if not n:
        return math.nan
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2.0


def without_trend(values: Sequence[float]) -> tuple[float, list[float]]:
    """Where a straight line through the medians of both halves ends, and the distances from it
    (resistant line: Tukey, Exploratory Data Analysis, 1977, with halves for his thirds).
    """
    n = len(values)
    half = n // 2
    first, last = median(values[:half]), median(values[half:])
    slope = (last - first) / (n / 2.0) if half else 0.0
    middle = (n - 1) / 2.0
    distances = [value - slope * (i - middle) for i, value in enumerate(values)]
    level = median(distances)
    return level + slope * (n - middle), [value - level for value in distances]


def spread(values: Sequence[float], centre: float, *, normal: bool = False) -> float:
    """Scale of the null model (Student's t with NU degrees), or of a normal one, from the
    median absolute deviation. With three standard errors on top: a scale that is taken to be too
    small makes false alarms.
    """
    mad = median([abs(value - centre) for value in values])
    sure = 1.0 + 3.0 * MAD_ERROR / math.sqrt(max(1, len(values)))
    return sure * mad / (NORMAL_MAD if normal else STUDENT_MAD)


def autocorrelation(values: Sequence[float], centre: float, errors: float = 1.0) -> float:
    """Of neighbours, in [0, 0.95]: from how often both are on one side of the centre (quadrant
    correlation, Blomqvist 1950), which no wild value moves; with so many standard errors on top.
    """
    signs = [value > centre for value in values if value != centre]
    if len(signs) < 2:
        return 0.0
    same = sum(a == b for a, b in itertools.pairwise(signs)) / (len(signs) - 1)
    found = math.sin(math.pi / 2.0 * (2.0 * same - 1.0)) + errors * SIGN_ERROR / math.sqrt(
        len(signs)
    )
    return min(0.95, max(0.0, found))
