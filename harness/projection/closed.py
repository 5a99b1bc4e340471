"""Closed forms of goodput and spares. Times in seconds, or all in another unit.

Symbols as in the sources: M mean time between failures while the job runs, tau useful work between
two checkpoints, delta what a checkpoint holds the job up, R a restart that can itself fail, D a
downtime that cannot.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from trainchaos.harness.projection.arrivals import Law

MOST_TERMS = 1 << 22
NEGLIGIBLE = 1e-15
HALVINGS = 60
_SMALL = 1e-8  # of which the square is lost in rounding
_LARGE = 1e200
_CERTAIN = 700.0  # e to this is nearly the largest number: what takes so many M is never done


def best_interval(delta: float, mtbf: float) -> float:
    """Useful work between two checkpoints at which goodput is highest, for failures at a constant
    rate: tau = M (1 + W0(-exp(-1 - delta / M))), where the derivative of ``goodput`` vanishes.

    ``recovery.policy.interval.optimum_s`` is Daly's estimate of it. Raises ValueError unless both
    are positive.
    """
    if not (delta > 0 and mtbf > 0):
        raise ValueError("a checkpoint and a time between failures take longer than nothing")
    # with u = tau / M the derivative vanishes where (1 - u) e^u = e^(-delta / M)
    ratio = delta / mtbf
    if ratio < _SMALL:  # both sides are 1 within rounding: the first two terms of the series
        return mtbf * (math.sqrt(2 * ratio) - 2 * ratio / 3)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):  # (1 - u) e^u falls from 1 to 0 on [0, 1]
        middle = (low + high) / 2
        if (1 - middle) * math.exp(middle) > math.exp(-ratio):
            low = middle
        else:
            high = middle
    return mtbf * (low + high) / 2


def goodput(tau: float, delta: float, restart: float, down: float, mtbf: float) -> float:
    """Share of time that is useful, for failures at a constant rate while the job runs or restarts:
    tau / [e^(R/M) (M + D) (e^((tau + delta)/M) - 1)] (Daly 2006, equation 20, with a downtime).
    """
    if (restart + tau + delta) / mtbf > _CERTAIN:
        return 0.0
    return tau / (math.exp(restart / mtbf) * (mtbf + down) * math.expm1((tau + delta) / mtbf))


def working(restart: float, down: float, mtbf: float) -> float:
    """Share of time in which the job works, whether it does so again or not: M / [e^(R/M) (M + D)],
    as ``goodput`` for segments of no length.
    """
    if restart / mtbf > _CERTAIN:
        return 0.0
    return mtbf / (math.exp(restart / mtbf) * (mtbf + down))


def goodput_of_law(law: Law, tau: float, delta: float, down: float) -> float:
    """As ``goodput`` without a restart that can fail, for any law of the times between failures,
    which begin anew with each: tau SUM_(i >= 1) S(i (tau + delta)) / (E[X] + D).

    Terms below 1e-15 are left out. Raises ValueError if that takes more than 4 million.
    """
    total, first = 0.0, 1
    block = 1 << 12
    while first <= MOST_TERMS:
        terms = law.survival((tau + delta) * np.arange(first, first + block, dtype=np.float64))
        total += float(terms.sum())
        if terms[-1] < NEGLIGIBLE:
            return tau * total / (law.mean_s + down)
        first += block
    raise ValueError("checkpoints are too frequent beside the time between failures")


def spares_for(
    availability: float, often: float, several: Sequence[float] = (1.0,), most: int = 1 << 20
) -> int:
    """The fewest spares with which all nodes of a job that goes on without some are there for this
    share of the time: the least k with P(nodes in repair <= k) of at least as much.

    ``often``: failures whose nodes are in repair, on average; ``several``: probabilities that one
    takes 1, 2, ... nodes. Failures in repair are Poisson, whatever the law of repair times, so that
    nodes are compound Poisson where those of a failure come back together; by Panjer's recursion,
    f(k) = (often / k) SUM n p(n) f(k - n). Raises ValueError beyond ``most``.
    """
    # e^-often is too small a number for large jobs: f is of another scale, e^scale
    scale, total, wanted = -often, 1.0, math.log(availability)
    # a failure takes a node at least: Chernoff's bound of P(Poisson <= most), of log
    if often > most > 0 and most - often + most * math.log(often / most) < wanted:
        raise ValueError(f"more than {most} spares")
    before = deque([1.0], maxlen=len(several))  # f(k - 1), f(k - 2), ...
    for k in range(most + 1):
        if k:
            terms = zip(several, before, strict=False)
            here = often / k * math.fsum(n * p * f for n, (p, f) in enumerate(terms, 1))
            before.appendleft(here)
            total += here
        if total > _LARGE:
            scale, total = scale + math.log(_LARGE), total / _LARGE
            before = deque((f / _LARGE for f in before), maxlen=len(several))
        if scale + math.log(total) >= wanted:
            return k
    raise ValueError(f"more than {most} spares")


def missing(spares: int, load: float) -> float:
    """Nodes that nobody takes the place of, on average: E[(A - k)+], where the nodes in repair, A,
    are Poisson with mean ``load``: load - k + SUM_(a < k) (k - a) P(A = a).
    """
    here, total = math.exp(-load), 0.0
    for a in range(spares):
        total += (spares - a) * here
        here *= load / (a + 1)
    return max(0.0, load - spares + total)
