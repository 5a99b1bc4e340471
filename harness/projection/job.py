"""The job of a strategy at a size, as both engines see it, and the memory that its trials take."""

from __future__ import annotations

import math

from trainchaos.harness.projection import closed
from trainchaos.harness.projection.arrivals import Law, Poisson, Trace, Weibull
from trainchaos.harness.projection.costs import RecoveryCost
from trainchaos.harness.projection.durations import Duration
from trainchaos.harness.projection.expected import Found, expected
from trainchaos.harness.projection.parallel import Part
from trainchaos.harness.projection.presets import DAY_S, mtbf_s
from trainchaos.harness.projection.result import Setting
from trainchaos.harness.projection.simulate import AHEAD, WIDER, Job, Lemons, Slow

SPARES = "hot-spare"
REPAIRS = 30
"""Mean times to repair a node that a job lasts for, from which on the formula of missing nodes is
of use: a job begins with none missing, so that they are half a repair's worth fewer, a sixtieth.
"""
ARRAYS = 60
"""With an entry a trial, at once."""


def nodes_of(setting: Setting, gpus: int) -> int:
    """Whole nodes for so many GPUs."""
    return math.ceil(gpus / setting.gpus_per_node)


def law_of(setting: Setting, nodes: int) -> Law:
    """The law of the times between failures at a size."""
    mean_s = mtbf_s(setting.rate, nodes)
    if setting.gaps:
        scale = mean_s * len(setting.gaps) / math.fsum(setting.gaps)
        return Trace([gap * scale for gap in setting.gaps])
    return Poisson(mean_s) if setting.weibull is None else Weibull(mean_s, setting.weibull)


def often(setting: Setting, nodes: int) -> float:
    """Mean time between failures, seconds, with all lemons still there: the rate of a mixture is
    the mean of its rates.
    """
    return mtbf_s(setting.rate, nodes) / (1 + setting.lemon_share * (setting.lemon_times - 1))


def taken(setting: Setting) -> float:
    """Nodes that a failure takes on average, of those that take any."""
    return math.fsum(n * share for n, share in enumerate(setting.several, 1))


def in_repair(setting: Setting, nodes: int) -> float:
    """Nodes in repair on average, were the job to fail at all times: Little's law."""
    repair_s = Duration(median_s=setting.repair_s, sigma=setting.repair_sigma).mean_s
    return (1.0 - setting.processes) * taken(setting) * repair_s / often(setting, nodes)


def job_of(setting: Setting, gpus: int, cost: RecoveryCost) -> Job:
    """The job of a strategy at a size."""
    nodes = nodes_of(setting, gpus)
    mean_s = often(setting, nodes)
    interval_s = setting.interval_s or _best_s(setting, cost, mean_s)
    loaded = setting.loads_measured and cost.kind == "measured"
    spares = None if not cost.shrinks else setting.spares if cost.strategy == SPARES else 0
    return Job(
        nodes=nodes,
        between=law_of(setting, nodes),
        wall=setting.definitions.failures_while == "always",
        replica_nodes=min(setting.replica_nodes, nodes),
        processes=setting.processes,
        several=setting.several,
        rollback=cost.rollback,
        shrinks=cost.shrinks,
        segment_s=interval_s,
        save_s=setting.save_s,
        step_s=setting.step_s,
        restart_s=setting.load_s if cost.rollback and not loaded else 0.0,
        stall=cost.at(nodes),
        spares=spares,
        repair=Duration(median_s=setting.repair_s, sigma=setting.repair_sigma),
        lemons=_lemons(setting),
        slow=_slow(setting, nodes),
    )


def paid(setting: Setting, job: Job) -> float:
    """Nodes that are paid for, for each that the job wants."""
    spare = job.spares or 0
    return 1.0 + spare / job.nodes if setting.definitions.spares_count else 1.0


def formula(setting: Setting, job: Job) -> Found:
    """Goodput by the formulas, by the definitions of the setting; None, and why, without one."""
    said = setting.definitions
    found, why = expected(job, again=said.rework == "useful", missing=said.missing == "useful")
    if found is None:
        return None, why
    if job.shrinks and setting.days * DAY_S < REPAIRS * job.repair.mean_s:
        return None, f"the formula of missing nodes is of jobs that last {REPAIRS} repairs and more"
    return found / paid(setting, job), ""


def bytes_of(part: Part) -> float:
    """Memory that the trials of a part take, estimated: for each trial the times drawn ahead (twice
    while they are drawn), when each node in repair is back (as many as on average and six standard
    deviations more, of a Poisson number of failures), and some arrays with an entry a trial.
    """
    setting = part.setting
    nodes = nodes_of(setting, part.gpus)
    rows = 0.0
    if part.cost.shrinks:
        load, most = in_repair(setting, nodes), len(setting.several)
        failures = setting.days * DAY_S / often(setting, nodes)
        rows = min(load + 6.0 * math.sqrt(load * most), failures * most) + most
    return 8.0 * setting.trials * (2 * AHEAD + 2 * (rows + WIDER) + ARRAYS)


def _lemons(setting: Setting) -> Lemons | None:
    if setting.lemon_share == 0.0:
        return None
    return Lemons(
        share=setting.lemon_share, times=setting.lemon_times, quarantine=setting.quarantine
    )


def _slow(setting: Setting, nodes: int) -> Slow | None:
    if setting.slow_rate == 0.0:
        return None
    return Slow(
        mean_s=mtbf_s(setting.slow_rate, nodes),
        factor=setting.slow_factor,
        found_s=setting.slow_found_s,
    )


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
