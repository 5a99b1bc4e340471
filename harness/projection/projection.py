"""Goodput, badput and cost of a job of each size under each strategy, by both engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.projection import closed
from trainchaos.harness.projection.arrivals import Law, Poisson, Trace, Weibull
from trainchaos.harness.projection.costs import LEAST_INCIDENTS, RecoveryCost
from trainchaos.harness.projection.expected import expected
from trainchaos.harness.projection.parallel import Part, play_all, refuse_memory
from trainchaos.harness.projection.presets import DAY_S, Preset, mtbf_s, rate_of
from trainchaos.harness.projection.result import (
    GPUS_PER_NODE,
    Z95,
    Projected,
    Projection,
    Setting,
    SparesNeeded,
)
from trainchaos.harness.projection.simulate import (
    AHEAD,
    CLASSES,
    WIDER,
    Duration,
    Job,
    Lemons,
    Outcome,
    Slow,
    TooManyEventsError,
    simulate,
)

SPARES = "hot-spare"
ARRAYS = 60
"""With an entry a trial, at once."""


def project(
    setting: Setting,
    costs: Mapping[str, RecoveryCost],
    failures_from: str,
    each: Callable[[float], None] = lambda share: None,
    jobs: int = 1,
) -> Projection:
    """Project every strategy of ``costs`` to every size of ``setting``, in ``jobs`` processes; the
    figures are the same whatever their number. ``each``: is told the share that is done.

    Raises ScenarioError where hot-spare has more spares than the job has nodes, there are more
    failures than can be played, or more memory is needed than there is.
    """
    smallest = min(setting.gpus)
    nodes = math.ceil(smallest / setting.gpus_per_node)
    if SPARES in costs and setting.spares > nodes:
        raise ScenarioError(
            f"{setting.spares} spares for a job of {nodes} nodes ({smallest} GPUs)",
            hint="fewer --spares",
        )
    parts = [Part(setting, gpus, cost) for gpus in setting.gpus for cost in costs.values()]
    needs = sorted((bytes_of(part) for part in parts), reverse=True)
    refuse_memory(math.fsum(needs[:jobs]))
    try:
        rows = play_all(parts, one, each, jobs)
    except TooManyEventsError as error:
        raise ScenarioError(str(error), hint="fewer --gpus or --days, or a lower --rate") from error
    return Projection(
        setting=setting,
        failures_from=failures_from,
        costs={name: cost.source for name, cost in costs.items()},
        cautions=_cautions(costs),
        notes=_notes(setting, costs),
        rows=rows,
        spares=spares_needed(setting),
    )


def spares_needed(setting: Setting) -> list[SparesNeeded]:
    """For the availability of the setting, at each size; [] where none is asked for. A failure that
    takes several nodes counts as so many, though Erlang's formula is of nodes that fail singly.
    """
    if setting.availability is None:
        return []
    repair_s = Duration(median_s=setting.repair_s, sigma=setting.repair_sigma).mean_s
    taken = math.fsum(n * share for n, share in enumerate(setting.several, 1))
    found = []
    for gpus in setting.gpus:
        nodes = math.ceil(gpus / setting.gpus_per_node)
        load = taken * repair_s / often(setting, nodes)
        spares: int | None
        try:
            spares = closed.spares_for(setting.availability, load)
        except ValueError:
            spares = None
        found.append(SparesNeeded(gpus=gpus, nodes=nodes, load=load, spares=spares))
    return found


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


def job_of(setting: Setting, gpus: int, cost: RecoveryCost) -> Job:
    """The job of a strategy at a size, as the simulation plays it."""
    nodes = math.ceil(gpus / setting.gpus_per_node)
    mean_s = often(setting, nodes)
    interval_s = setting.interval_s or _best_s(setting, cost, mean_s)
    spares = None if not cost.shrinks else setting.spares if cost.strategy == SPARES else 0
    return Job(
        nodes=nodes,
        between=law_of(setting, nodes),
        wall=setting.definitions.failures_while == "always",
        replica_nodes=min(setting.replica_nodes, nodes),
        several=setting.several,
        rollback=cost.rollback,
        shrinks=cost.shrinks,
        segment_s=interval_s,
        save_s=setting.save_s,
        step_s=setting.step_s,
        restart_s=setting.load_s if cost.rollback else 0.0,
        stall=cost.at(nodes),
        spares=spares,
        repair=Duration(median_s=setting.repair_s, sigma=setting.repair_sigma),
        lemons=_lemons(setting),
        slow=_slow(setting, nodes),
    )


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


def bytes_of(part: Part) -> float:
    """Memory that the trials of a part take, estimated: for each trial the times drawn ahead (twice
    while they are drawn), when each node in repair is back (as many as on average and six standard
    deviations more, of a Poisson number), and some arrays with an entry a trial.
    """
    setting = part.setting
    nodes = math.ceil(part.gpus / setting.gpus_per_node)
    rows = 0.0
    if part.cost.shrinks:
        repair_s = Duration(median_s=setting.repair_s, sigma=setting.repair_sigma).mean_s
        taken = math.fsum(n * share for n, share in enumerate(setting.several, 1))
        load = taken * repair_s / often(setting, nodes)
        rows = min(load + 6.0 * math.sqrt(load), setting.days * DAY_S / often(setting, nodes))
    return 8.0 * setting.trials * (2 * AHEAD + 2 * (rows + WIDER) + ARRAYS)


def one(part: Part, each: Callable[[float], None]) -> Projected:
    """Project one strategy to one size, by both engines."""
    setting, gpus, cost = part.setting, part.gpus, part.cost
    job = job_of(setting, gpus, cost)
    horizon_s = setting.days * DAY_S
    random = np.random.default_rng([setting.seed, gpus, *cost.strategy.encode()])
    played = simulate(job, horizon_s, setting.trials, random, each)
    paid = _paid(setting, job)
    goodput = played.goodput / paid
    error = float(goodput.std(ddof=1)) / math.sqrt(setting.trials)
    formula, why = expected(job)
    mean = float(goodput.mean())
    worst, best = np.percentile(goodput, [5, 95])
    hours = gpus * paid * horizon_s / 3600.0
    # the mean recovery may be as much longer or shorter, with each failure
    stalled = float(played.failures.mean()) * job.stall.mean_s / horizon_s / paid
    half = math.hypot(Z95 * error, cost.unsure * stalled)
    return Projected(
        strategy=cost.strategy,
        gpus=gpus,
        nodes=job.nodes,
        mtbf_s=often(setting, job.nodes),
        interval_s=job.segment_s,
        stall_s=job.stall.median_s,
        goodput=mean,
        error=error,
        low=mean - half,
        high=mean + half,
        worst=float(worst),
        best=float(best),
        closed=None if formula is None else formula / paid,
        why=why,
        badput=_badput(played, paid),
        failures=float(played.failures.mean()),
        ettr=mean * paid,
        finish_days=setting.days / (mean * paid) if mean > 0 else None,
        lost_gpu_hours=(1.0 - mean) * hours,
        gpu_hours=hours,
        price=None if setting.price is None else setting.price * hours,
        lost_price=None if setting.price is None else setting.price * (1.0 - mean) * hours,
    )


def _paid(setting: Setting, job: Job) -> float:
    """Nodes that are paid for, for each that the job wants."""
    spare = job.spares or 0
    return 1.0 + spare / job.nodes if setting.definitions.spares_count else 1.0


def _badput(played: Outcome, paid: float) -> dict[str, float]:
    found = {name: float(played.lost_s[name].mean()) / played.horizon_s / paid for name in CLASSES}
    return {**found, "spares": 1.0 - 1.0 / paid}


def _cautions(costs: Mapping[str, RecoveryCost]) -> list[str]:
    few = [
        f"{name} ({one.incidents})"
        for name, one in costs.items()
        if 0 < one.incidents < LEAST_INCIDENTS
    ]
    if not few:
        return []
    return [
        f"fewer than {LEAST_INCIDENTS} incidents were measured of {', '.join(few)}: how much"
        " recoveries vary is not known, and the intervals are too narrow"
    ]


def _notes(setting: Setting, costs: Mapping[str, RecoveryCost]) -> list[str]:
    notes = []
    words = {
        "running": "failures come while the job runs",
        "always": "failures come at any time, also during recoveries",
    }
    counted = "counted" if setting.definitions.spares_count else "not counted"
    notes.append(
        f"{words[setting.definitions.failures_while]}; work done again is not useful; nodes that"
        f" are missing make the rest as much less useful; spare nodes are {counted} in the"
        " denominator"
    )
    if setting.lemon_share:
        left = (
            "for good"
            if setting.quarantine is None
            else f"until {setting.quarantine} failures, when a plain node takes the place"
        )
        notes.append(
            f"{setting.lemon_share:.4g} of the nodes fail {setting.lemon_times:g} times as often as"
            f" the rate says, {left}"
        )
    if setting.slow_rate:
        found = (
            "never found"
            if setting.slow_found_s is None
            else f"found after {setting.slow_found_s:g} s of running and swapped with a stall"
        )
        notes.append(
            f"{setting.slow_rate:g} nodes in 1,000 become slow a day, make the job take"
            f" {setting.slow_factor:g} times as long, and are {found}"
        )
    flat = [name for name, one in costs.items() if one.incidents and not one.per_doubling_s]
    if flat:
        notes.append(
            f"recovery of {', '.join(flat)} is taken to be as measured at every size: --growth adds"
            " seconds for each doubling"
        )
    return notes


def sizes(first: int, last: int) -> tuple[int, ...]:
    """Powers of two from ``first`` (or the next one) to ``last``."""
    return tuple(1 << k for k in range((first - 1).bit_length(), last.bit_length()))


def said_from(preset: Preset | None, rate: float | None, gpus_per_node: int = GPUS_PER_NODE) -> str:
    """Where the rate of failures is from, for people."""
    if preset is None or rate is not None:
        return f"{rate:g} failures per 1,000 nodes and day, as given"
    note = f"; {preset.note}" if preset.note else ""
    said = f"{rate_of(preset, gpus_per_node):.3g} failures per 1,000 nodes and day"
    if gpus_per_node != GPUS_PER_NODE:
        note = f"{note}; scaled from nodes of {GPUS_PER_NODE} GPUs to nodes of {gpus_per_node}"
    return f"{said} ({preset.source}{note})"
