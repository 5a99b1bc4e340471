"""What the formulas say of a job that the simulation plays, wherever they hold."""

from __future__ import annotations

import math
from dataclasses import replace

from trainchaos.harness.projection import closed
from trainchaos.harness.projection.arrivals import Poisson
from trainchaos.harness.projection.simulate import Job

ALL_GONE = 0.5
"""Expected share of replicas missing beyond which the mean is cut off too often for a formula."""
NEGLIGIBLE = 1e-12
"""Probability of a number of lemons, beside the likeliest, below which it is left out."""
Found = tuple[float | None, str]


def expected(job: Job, *, again: bool = False, missing: bool = False) -> Found:
    """Goodput of the job's nodes by the formulas; None with the reason where they do not apply.
    ``again``: work that is done again is useful; ``missing``: so is the work of nodes that are
    missing, as long as there are others.
    """
    if job.wall:
        return None, "the formulas hold for failures while the job runs"
    constant = isinstance(job.between, Poisson)
    if job.lemons is not None:
        if job.lemons.quarantine is not None:
            return None, "with a quarantine the rate of failures falls as the job goes on"
        if not constant:
            return None, "lemons have a formula only beside a constant rate"
        return _over_lemons(job, again, missing)
    if job.slow is not None:
        if not constant:
            return None, "slow nodes have a formula only beside a constant rate of failures"
        if job.slow.found_s is None:
            return None, "a slow node that is never found slows all that is left of the job"
    return _plain(job, again, missing)


def _over_lemons(job: Job, again: bool, missing: bool) -> Found:
    """The mean over how many lemons a job has, which is binomial; each is a constant rate."""
    assert job.lemons is not None
    total, weight = 0.0, 0.0
    for lemons, chance in binomial(job.nodes, job.lemons.share):
        faster = 1.0 + lemons * (job.lemons.times - 1.0) / job.nodes
        law = Poisson(job.between.mean_s / faster)
        found, why = expected(replace(job, lemons=None, between=law), again=again, missing=missing)
        if found is None:
            return None, why
        total += chance * found
        weight += chance
    return total / weight, ""


def binomial(count: int, share: float) -> list[tuple[int, float]]:
    """Numbers out of ``count`` and their probabilities, those that matter beside the likeliest."""
    if not 0.0 < share < 1.0:
        return [(round(count * share), 1.0)]

    def log_of(k: int) -> float:
        ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        return ways + k * math.log(share) + (count - k) * math.log1p(-share)

    likeliest = min(count, int((count + 1) * share))
    least = log_of(likeliest) + math.log(NEGLIGIBLE)
    low = high = likeliest
    while low > 0 and log_of(low - 1) > least:
        low -= 1
    while high < count and log_of(high + 1) > least:
        high += 1
    return [(k, math.exp(log_of(k))) for k in range(low, high + 1)]


def _plain(job: Job, again: bool, missing: bool) -> Found:
    stall_s = job.stall.mean_s
    speed, swaps = _slowed(job)
    stall_s += swaps * job.between.mean_s * stall_s  # swaps stall as failures do
    if job.rollback:
        found, why = _rollback(job, stall_s, again)
    else:
        found, why = _forward(job, stall_s, again, missing)
    return (None, why) if found is None else (found * speed, "")


def _slowed(job: Job) -> tuple[float, float]:
    """Speed while the job runs, and swaps a second of running. It is fast for a mean time g, then
    slow for d, again and again: one swap and g + d / factor of work in g + d.
    """
    if job.slow is None or job.slow.found_s is None:
        return 1.0, 0.0
    fast_s, slow_s = job.slow.mean_s, job.slow.found_s
    return (fast_s + slow_s / job.slow.factor) / (fast_s + slow_s), 1.0 / (fast_s + slow_s)


def _rollback(job: Job, stall_s: float, again: bool) -> Found:
    law = job.between
    busy = job.segment_s / (job.segment_s + job.save_s)
    if isinstance(law, Poisson):
        if again:
            return busy * closed.working(job.restart_s, stall_s, law.mean_s), ""
        return (
            closed.goodput(job.segment_s, job.save_s, job.restart_s, stall_s, law.mean_s),
            "",
        )
    if job.restart_s > 0:
        return None, "a restart that can fail has no formula but for a constant rate"
    if again:
        return busy * closed.working(0.0, stall_s, law.mean_s), ""
    try:
        return closed.goodput_of_law(law, job.segment_s, job.save_s, stall_s), ""
    except ValueError as error:
        return None, str(error)


def _forward(job: Job, stall_s: float, again: bool, missing: bool) -> Found:
    """Without a rollback: what it lacks is a step for each failure, stalls, and missing nodes."""
    law = job.between
    if not isinstance(law, Poisson):
        return None, "spares that are repaired have no formula but for a constant rate"
    if len(job.several) > 1:
        return None, "nodes lost together have no formula here"
    busy = job.segment_s / (job.segment_s + job.save_s)
    if again:
        going = closed.working(0.0, stall_s, law.mean_s)
    else:
        going = closed.goodput(job.step_s, 0.0, 0.0, stall_s, law.mean_s)
    # nodes in repair are Poisson, whatever the law of repair times, as each is repaired by itself;
    # while the job runs none of them is missing for the time of its own stall
    away_s = max(0.0, job.repair.mean_s - stall_s)
    load = (1.0 - job.processes) * away_s / (law.mean_s + stall_s)
    gone = closed.missing(job.spares or 0, load) * job.slowing * job.replica_nodes / job.nodes
    if gone > ALL_GONE:
        return None, "so many replicas are missing at once that the job stands still at times"
    return busy * going * (1.0 if missing else 1.0 - gone), ""
