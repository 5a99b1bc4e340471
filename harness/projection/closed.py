"""Closed forms of goodput and spares, and what they say of a job, wherever they hold. Times in
seconds, or all in another unit.

Symbols as in the sources: M mean time between failures while the job runs, tau useful work between
two checkpoints, delta what a checkpoint holds the job up, R a restart that can itself fail, D a
downtime that cannot. ``again``: work that is done again is useful too, as if segments were short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainchaos.harness.projection.laws import Law, Weibull
from trainchaos.harness.projection.simulate import Job

MOST_TERMS = 1 << 22
MOST_SPARES = 1 << 20
NEGLIGIBLE = 1e-15
ROUNDING = 1e-12
UNLIKELY = 1e-12  # beside the likeliest
HALVINGS = 60
_SMALL = 1e-8  # of which the square is lost in rounding
ALL_GONE = 0.5
"""Expected share of replicas missing beyond which the mean is cut off too often for a formula."""
Expected = tuple[float | None, str]
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


def goodput(
    tau: float, delta: float, restart: float, down: float, mtbf: float, again: bool = False
) -> float:
    """Share of time that is useful, for failures at a constant rate while the job runs or restarts:
    tau / [e^(R/M) (M + D) (e^((tau + delta)/M) - 1)] (Daly 2006, equation 20, with a downtime).
    """
    if (restart + (0.0 if again else tau + delta)) / mtbf > _CERTAIN:
        return 0.0
    cycle = (tau + delta) / mtbf if again else math.expm1((tau + delta) / mtbf)
    return tau / (math.exp(restart / mtbf) * (mtbf + down) * cycle)


def goodput_of_law(law: Law, tau: float, delta: float, down: float, again: bool = False) -> float:
    """As ``goodput`` without a restart that can fail, for any law of the times between failures,
    which begin anew with each: tau SUM_(i >= 1) S(i (tau + delta)) / (E[X] + D).

    Terms below 1e-15 are left out. Raises ValueError if that takes more than 4 million.
    """
    if again:
        return tau / (tau + delta) * law.mean_s / (law.mean_s + down)
    total, block = 0.0, 1 << 12
    for first in range(1, MOST_TERMS, block):
        terms = law.survival((tau + delta) * np.arange(first, first + block, dtype=np.float64))
        total += float(terms.sum())
        if terms[-1] < NEGLIGIBLE:
            return tau * total / (law.mean_s + down)
    raise ValueError("checkpoints are too frequent beside the time between failures")


def spares_for(availability: float, often: float, several: Sequence[float] = (1.0,)) -> int | None:
    """The fewest spares with which all nodes of a job that goes on without some are there for this
    share of the time: the least k with P(nodes in repair <= k) of at least as much, within
    ``ROUNDING``; None beyond ``MOST_SPARES``.

    ``often``: failures whose nodes are in repair, on average; ``several``: probabilities that one
    takes 1, 2, ... nodes. Failures in repair are Poisson, whatever the law of repair times, so that
    nodes are compound Poisson where those of a failure come back together: of the transform
    exp(often (p - 1)), where p is that of ``several``.
    """
    sizes = np.arange(1, len(several) + 1)
    mean, deviation = often * (sizes @ several), math.sqrt(often * (sizes**2 @ several))
    # beyond 40 deviations there is nothing that would come round to the other end
    count = int(mean + 40.0 * (deviation + len(several))) + 1
    if count > 2 * MOST_SPARES:
        return None
    shares = np.fft.irfft(np.exp(often * (np.fft.rfft([0.0, *several], count) - 1.0)), count)
    enough = np.flatnonzero(np.cumsum(shares) >= availability - ROUNDING)
    return int(enough[0]) if len(enough) and enough[0] <= MOST_SPARES else None


def missing_nodes(spares: int, load: float) -> float:
    """Nodes that nobody takes the place of, on average: E[(A - k)+], where the nodes in repair, A,
    are Poisson with mean ``load``: load - k + SUM_(a < k) (k - a) P(A = a).
    """
    here, total = math.exp(-load), 0.0
    for a in range(spares):
        total += (spares - a) * here
        here *= load / (a + 1)
    return max(0.0, load - spares + total)


def expected(
    job: Job, *, again: bool = False, missing: bool = False, longer_s: float = 0.0
) -> Expected:
    """Goodput of the job's nodes by the formulas; None with the reason where they do not apply.
    ``again``: work that is done again is useful; ``missing``: so is the work of nodes that are
    missing, as long as there are others; ``longer_s``: added to each recovery.
    """
    if job.wall:
        return None, "the formulas hold for failures while the job runs"
    if job.lemons is not None:
        if job.lemons.quarantine is not None:
            return None, "with a quarantine the rate of failures falls as the job goes on"
        if not job.between.constant:
            return None, "lemons have a formula only beside a constant rate"
        return _over_lemons(job, again, missing, longer_s)
    if job.slow is not None:
        if not job.between.constant:
            return None, "slow nodes have a formula only beside a constant rate of failures"
        if job.slow.found_s is None:
            return None, "a slow node that is never found slows all that is left of the job"
    stall_s = job.stall.mean_s + longer_s
    speed, swaps = _slowed(job)
    stall_s += swaps * job.between.mean_s * stall_s  # swaps stall as failures do
    share, why = (
        _rollback(job, stall_s, again) if job.rollback else _forward(job, stall_s, again, missing)
    )
    return None if share is None else share * speed, why


def _over_lemons(job: Job, again: bool, missing: bool, longer_s: float) -> Expected:
    """The mean over how many lemons a job has, which is binomial; each is a constant rate."""
    assert job.lemons is not None
    total, weight = 0.0, 0.0
    for lemons, chance in binomial(job.nodes, job.lemons.share):
        faster = 1.0 + lemons * (job.lemons.times - 1.0) / job.nodes
        one_rate = replace(job, lemons=None, between=Weibull(job.between.mean_s / faster))
        share, why = expected(one_rate, again=again, missing=missing, longer_s=longer_s)
        if share is None:
            return None, why
        total += chance * share
        weight += chance
    return total / weight, ""


def binomial(count: int, share: float) -> list[tuple[int, float]]:
    """Numbers out of ``count`` and their probabilities, those that matter beside the likeliest."""
    if not 0.0 < share < 1.0:
        return [(round(count * share), 1.0)]
    numbers = np.arange(count + 1)
    steps = np.log((count - numbers[:-1]) / numbers[1:] * share / (1.0 - share))
    logs = count * math.log1p(-share) + np.concatenate([[0.0], np.cumsum(steps)])
    kept = np.flatnonzero(logs > logs.max() + math.log(UNLIKELY))
    return [(int(k), math.exp(logs[k])) for k in kept]


def _slowed(job: Job) -> tuple[float, float]:
    """Speed while the job runs, and swaps a second of running. It is fast for a mean time g, then
    slow for d, again and again: one swap and g + d / factor of work in g + d.
    """
    if job.slow is None or job.slow.found_s is None:
        return 1.0, 0.0
    fast_s, slow_s = job.slow.mean_s, job.slow.found_s
    return (fast_s + slow_s / job.slow.factor) / (fast_s + slow_s), 1.0 / (fast_s + slow_s)


def _rollback(job: Job, stall_s: float, again: bool) -> Expected:
    law, segment_s, save_s = job.between, job.segment_s, job.save_s
    if law.constant:
        return goodput(segment_s, save_s, job.restart_s, stall_s, law.mean_s, again), ""
    if job.restart_s > 0:
        return None, "a restart that can fail has no formula but for a constant rate"
    try:
        return goodput_of_law(law, segment_s, save_s, stall_s, again), ""
    except ValueError as error:
        return None, str(error)


def _forward(job: Job, stall_s: float, again: bool, missing: bool) -> Expected:
    """Without a rollback: what it lacks is a step for each failure, stalls, and missing nodes."""
    law = job.between
    if not law.constant:
        return None, "spares that are repaired have no formula but for a constant rate"
    if len(job.several) > 1:
        return None, "nodes lost together have no formula here"
    going = job.busy * goodput(job.step_s, 0.0, 0.0, stall_s, law.mean_s, again)
    # nodes in repair are Poisson, whatever the law of repair times, as each is repaired by itself;
    # while the job runs none of them is missing for the time of its own stall
    away_s = max(0.0, job.repair.mean_s - stall_s)
    load = (1.0 - job.processes) * away_s / (law.mean_s + stall_s)
    gone = missing_nodes(job.spares or 0, load) * job.slowing * job.replica_nodes / job.nodes
    if gone > ALL_GONE:
        return None, "so many replicas are missing at once that the job stands still at times"
    return going * (1.0 if missing else 1.0 - gone), ""
