"""The job of a strategy at a size, as both engines see it."""

from __future__ import annotations

import math

from trainchaos.harness.projection import closed
from trainchaos.harness.projection.costs import RecoveryCost
from trainchaos.harness.projection.laws import Duration, Law, Trace, Weibull
from trainchaos.harness.projection.presets import DAY_S, mtbf_s
from trainchaos.harness.projection.result import Setting
from trainchaos.harness.projection.simulate import Job, Lemons, Slow

SPARES = "hot-spare"
REPAIRS = 30
"""Mean times to repair a node that a job lasts for, from which on the formula of missing nodes is
of use: a job begins with none missing, so that they are half a repair's worth fewer, a sixtieth.
"""


def nodes_of(setting: Setting, gpus: int) -> int:
    """Whole nodes for so many GPUs."""
    return math.ceil(gpus / setting.gpus_per_node)


def law_of(setting: Setting, nodes: int) -> Law:
    """The law of the times between failures at a size."""
    mean_s = mtbf_s(setting.rate, nodes)
    if setting.gaps:
        scale = mean_s * len(setting.gaps) / math.fsum(setting.gaps)
        return Trace([gap * scale for gap in setting.gaps])
    return Weibull(mean_s, setting.weibull or 1.0)


def often(setting: Setting, nodes: int) -> float:
    """Mean time between failures, seconds, with all lemons still there: the rate of a mixture is
    the mean of its rates.
    """
    return mtbf_s(setting.rate, nodes) / (1 + setting.lemon_share * (setting.lemon_times - 1))


def repair_of(setting: Setting) -> Duration:
    """Until a lost node is back."""
    return Duration(median_s=setting.repair_s, sigma=setting.repair_sigma)


def job_of(setting: Setting, gpus: int, cost: RecoveryCost) -> Job:
    """The job of a strategy at a size."""
    nodes = nodes_of(setting, gpus)
    loaded = setting.loads_measured and cost.kind == "measured"
    lemons = Lemons(
        share=setting.lemon_share, times=setting.lemon_times, quarantine=setting.quarantine
    )
    slow_s = mtbf_s(setting.slow_rate, nodes) if setting.slow_rate else math.inf
    slow = Slow(mean_s=slow_s, factor=setting.slow_factor, found_s=setting.slow_found_s)
    return Job(
        nodes=nodes,
        between=law_of(setting, nodes),
        wall=setting.definitions.failures_while == "always",
        replica_nodes=min(setting.replica_nodes, nodes),
        processes=setting.processes,
        several=setting.several,
        rollback=cost.rollback,
        segment_s=setting.interval_s or _best_s(setting, cost, often(setting, nodes)),
        save_s=setting.save_s,
        step_s=setting.step_s,
        restart_s=setting.load_s if cost.rollback and not loaded else 0.0,
        stall=cost.at(nodes),
        spares=None if cost.rollback else setting.spares if cost.strategy == SPARES else 0,
        repair=repair_of(setting),
        lemons=lemons if setting.lemon_share else None,
        slow=slow if setting.slow_rate else None,
    )


def paid(setting: Setting, job: Job) -> float:
    """Nodes that are paid for, for each that the job wants."""
    return 1.0 + (job.spares or 0) / job.nodes if setting.definitions.spares_count else 1.0


def formula(setting: Setting, job: Job, longer_s: float = 0.0) -> closed.Expected:
    """Goodput by the formulas, by the definitions of the setting; None, and why, without one.
    ``longer_s``: of each recovery.
    """
    words = setting.definitions
    again, missing = words.rework == "useful", words.missing == "useful"
    share, why = closed.expected(job, again=again, missing=missing, longer_s=longer_s)
    if share is None:
        return None, why
    if job.spares is not None and setting.days * DAY_S < REPAIRS * job.repair.mean_s:
        return None, f"the formula of missing nodes is of jobs that last {REPAIRS} repairs and more"
    return share / paid(setting, job), ""


def _best_s(setting: Setting, cost: RecoveryCost, mean_s: float) -> float:
    """Whole steps; a strategy that never rolls back saves once a day, against what it cannot
    answer.
    """
    if not cost.rollback:
        return DAY_S
    if setting.save_s <= 0:
        return setting.step_s
    best_s = closed.best_interval(setting.save_s, mean_s)
    return max(1, round(best_s / setting.step_s)) * setting.step_s
