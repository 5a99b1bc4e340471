"""Quantiles and tails of the null models from which thresholds follow.

Closed forms and series only: a supervisor does not import scipy.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

NU = 3.0
"""Degrees of freedom of the null model of noise: Student's t with 3 has a finite variance and the
heaviest tail of those with a whole number of degrees that do (P(T > t) ~ 1.1 / t^3). Step times and
gradient norms are heavy-tailed; how heavy differs from job to job, so the model errs to that side.
"""


def student_tail(t: float) -> float:
    """P(T > t) for 3 degrees of freedom, t >= 0 (closed form: Johnson, Kotz and Balakrishnan,
    Continuous Univariate Distributions, vol. 2, ch. 28).
    """
    x = t / math.sqrt(NU)
    if x > 1e3:  # the difference below cancels
        return 2.0 / (3.0 * math.pi * x**3)
    return 0.5 - (math.atan(x) + x / (1.0 + x * x)) / math.pi


@cache
def student_quantile(tail: float) -> float:
    """t with P(T > t) = ``tail``, 0 < tail <= 0.5: bisection."""
    if not 0.0 < tail <= 0.5:
        raise ValueError(f"a tail is in (0, 0.5]: {tail}")
    low, high = 0.0, 1.0
    while student_tail(high) > tail:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if student_tail(middle) > tail else (low, middle)
    return high


STUDENT_MAD = student_quantile(0.25)
"""Median absolute deviation of the null model: an observed one, divided by this, is its scale."""
NORMAL_MAD = NormalDist().inv_cdf(0.75)


def predicted_tail(count: int, events: int, span_s: float, window_s: float) -> float:
    """P(N >= ``count``) in a window, of a Poisson process of which ``events`` were seen in a span
    before it. Its rate is not known, but has the posterior Gamma(events + 1/2, span) of Jeffreys'
    prior, so N is negative binomial (Gelman et al., Bayesian Data Analysis, 3rd ed., sec. 2.6).
    """
    if count <= 0:
        return 1.0
    shape = events + 0.5
    in_window = window_s / (span_s + window_s)
    # The sum of the tail itself, as 1 minus the sum below it would cancel.
    term = math.exp(
        math.lgamma(shape + count)
        - math.lgamma(shape)
        - math.lgamma(count + 1.0)
        + shape * math.log1p(-in_window)
        + count * math.log(in_window)
    )
    total, k = 0.0, count
    while term > 1e-17 * (total + 1e-300) and k < count + 10_000:
        total += term
        term *= (shape + k) / (k + 1.0) * in_window
        k += 1
    return min(1.0, total)


def poisson_upper(events: int, confidence: float = 0.95) -> float:
    """Upper bound of the mean of a Poisson count, one-sided (Garwood 1936): the mean at which so
    few events have probability 1 - confidence.
    """
    low, high = float(events), float(events) + 1.0

    def at_most(mean: float) -> float:
        """P(N <= events)."""
        logs = (k * math.log(mean) - mean - math.lgamma(k + 1.0) for k in range(events + 1))
        return math.fsum(math.exp(one) for one in logs)

    while at_most(high) > 1.0 - confidence:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        if middle > 0.0 and at_most(middle) <= 1.0 - confidence:
            high = middle
        else:
            low = middle
    return high
