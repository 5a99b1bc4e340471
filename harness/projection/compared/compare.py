"""Projected against measured goodput: the very job of stored runs, under its own failures.

The costs of a recovery are from other arms than those that are compared, so that no arm is
projected from itself. Control arms have no fault, and so are used for both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.projection.compared.predictive import arms_known, predict, undisturbed
from trainchaos.harness.projection.costs import LEAST_INCIDENTS, PUBLISHED
from trainchaos.harness.projection.durations import Duration
from trainchaos.harness.projection.observed import (
    Group,
    Stored,
    groups,
    law_of_failures,
    spread,
    unfinished,
)
from trainchaos.harness.projection.result import Compared, t95
from trainchaos.harness.projection.simulate import Job

LEAST_ARMS = 3
"""From two, Student's t is 12.7 deviations wide, which says nearly nothing of how arms differ."""


def compare(
    runs: Sequence[Stored],
    others: Sequence[Stored],
    seed: int,
    each: Callable[[float], None] = lambda share: None,
) -> tuple[list[Compared], list[str]]:
    """Set the jobs of ``runs`` beside their projections, from the costs of ``others``; without
    those from the arms of even repeats, and compare the arms of odd ones. Also returns cautions.

    Raises ScenarioError where a run is in both, the scenarios differ, the failures do not come at
    random, or there are no control arms or no other arms to take costs from.
    """
    _refuse_circles(runs, others)
    repeats = sorted({arm.repeat for run in runs for arm in run.results.arms})
    if others:
        source, asked = groups(others), groups(runs)
    else:
        source = groups(runs, [n for n in repeats if n % 2 == 0])
        asked = groups(runs, [n for n in repeats if n % 2 == 1])
    if not asked:
        raise ScenarioError(
            "no run has a strategy that can be projected", hint=f"there are {', '.join(PUBLISHED)}"
        )
    from_what = "other runs" if others else "arms of even repeats"
    found, known = [], []
    for done, (key, group) in enumerate(asked.items()):
        costs = _fit(source.get(key), group, bool(others))
        found.append(_one(group, costs, from_what, seed))
        known.append(arms_known(group, costs))
        each((done + 1) / len(asked))
    return found, [*_cautions(found, runs, asked), *_few_arms(found, known)]


def _refuse_circles(runs: Sequence[Stored], others: Sequence[Stored]) -> None:
    ids = {run.results.run_id for run in runs}
    if twice := sorted(ids & {run.results.run_id for run in others}):
        raise ScenarioError(
            f"run {twice[0]} is in both --runs and --compare: it would be compared with itself",
            hint="leave --runs out to take the costs from half of its arms",
        )
    names = sorted({run.results.scenario for run in (*runs, *others)})
    if len(names) > 1:
        raise ScenarioError(
            f"the runs are of different scenarios: {', '.join(names)}",
            hint="costs of another job are no measure of this one",
        )


def _fit(source: Group | None, group: Group, others: bool) -> Group:
    """The group that the costs are from."""
    where = f"{group.strategy} at {group.ranks} ranks"
    if not group.controls:
        raise ScenarioError(
            f"{where}: no control arm says how the job goes without failures",
            hint="run the scenario with baseline: paired",
        )
    if not group.faulted:
        raise ScenarioError(f"{where}: no arm to compare with", hint="run with --repeat 2 or more")
    if source is None or source.failures == 0 or not source.stalls_s:
        place = "the runs of --runs" if others else "the arms of even repeats"
        raise ScenarioError(
            f"{where}: no recovery in {place} says what one costs",
            hint="run with more repeats, or give --runs of the same scenario",
        )
    return source


def job_of(group: Group, source: Group) -> Job:
    """The job of a group, a node for each rank, with the costs of another. What saves and all else
    take without failures (the control arms) is taken as time that checkpoints hold the job up.
    """
    scenario = group.cell.scenario
    kind = PUBLISHED[group.strategy]
    step_s = statistics.fmean(arm.step_s for arm in group.controls)
    every = scenario.workload.checkpoint.every
    segment_s = step_s * (every if isinstance(every, int) else scenario.workload.steps)
    base = undisturbed(group)
    away_s = statistics.fmean(source.away_s) if source.away_s else 0.0
    stall = stall_of_group(source)
    spares = int(scenario.recovery.params.get("spares", 1)) if kind.strategy == "hot-spare" else 0
    return Job(
        nodes=group.ranks,
        between=law_of_failures(group.cell),
        wall=True,
        slowing=_slowing(source, away_s, stall.mean_s),
        rollback=kind.rollback,
        shrinks=kind.shrinks,
        segment_s=segment_s,
        save_s=segment_s * (1.0 / base - 1.0),
        step_s=step_s,
        restart_s=0.0,
        stall=stall,
        spares=spares if kind.shrinks and away_s > 0 else None,
        repair=Duration(median_s=away_s),
    )


def stall_of_group(source: Group) -> Duration:
    """Mean: all time from failures until the job trained again, by failures, so that recoveries
    that overlap count once and pauses to take a replacement in count too; spread: of those alone.
    """
    mean_s = math.fsum(arm.stalled_s for arm in source.faulted) / source.failures
    logs = [math.log(one) for one in source.stalls_s]
    sigma = spread(logs) if len(logs) >= LEAST_INCIDENTS else 0.0
    return Duration(median_s=mean_s / math.exp(sigma**2 / 2), sigma=sigma)


def _slowing(source: Group, away_s: float, stall_s: float) -> float:
    """Time that was lost to missing ranks, by the time that would have been if each computed for
    itself. Ranks that share processors lose less: the rest gets those of the missing one.
    """
    missing_s = source.failures * max(0.0, away_s - stall_s) / source.ranks
    lost_s = math.fsum(arm.degraded_s for arm in source.faulted)
    return min(1.0, lost_s / missing_s) if missing_s > 0 else 1.0


def _one(group: Group, source: Group, from_what: str, seed: int) -> Compared:
    random = np.random.default_rng([seed, group.ranks, *group.strategy.encode()])
    job = job_of(group, source)
    measured = [arm.goodput for arm in group.faulted]
    found = predict(group, source, job, random)
    center = statistics.fmean(measured)
    half = _half(measured)
    return Compared(
        strategy=group.strategy,
        ranks=group.ranks,
        projected=found.goodput,
        low=found.low,
        high=found.high,
        measured=measured,
        measured_low=None if half is None else max(0.0, center - half),
        measured_high=None if half is None else min(1.0, center + half),
        failures_projected=found.failures,
        failures_measured=statistics.fmean(arm.failures for arm in group.faulted),
        mtbf_s=job.between.mean_s,
        stall_s=job.stall.mean_s,
        away_s=job.repair.median_s,
        incidents=source.failures,
        undisturbed=undisturbed(group),
        costs_from=from_what,
    )


def _half(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of a mean, by Student's t; None of one value."""
    if len(values) < 2:
        return None
    t = t95(len(values) - 1)
    return t * spread(values) / math.sqrt(len(values))


def _cautions(
    found: Sequence[Compared], runs: Sequence[Stored], asked: dict[tuple[str, int], Group]
) -> list[str]:
    said = []
    if few := [f"{o.strategy} at {o.ranks} ranks ({o.incidents})" for o in found if _few(o)]:
        said.append(
            f"fewer than {LEAST_INCIDENTS} incidents say what a recovery costs of"
            f" {', '.join(few)}: the intervals are too narrow"
        )
    if left := unfinished(runs):
        said.append(f"arms that did not complete are left out: {', '.join(left)}")
    for group in asked.values():
        most = group.cell.scenario.faults[0].at.max
        if most is not None and any(arm.failures >= most for arm in group.faulted):
            said.append(
                f"{group.strategy} at {group.ranks} ranks had the most failures that its scenario"
                f" allows ({most}), fewer than its rate says"
            )
    return said


def _few_arms(found: Sequence[Compared], known: Sequence[tuple[int, int]]) -> list[str]:
    """Where too few arms say how arms differ. ``known``: of each, those with failures that costs
    are from, and control arms.
    """
    narrow: list[str] = []
    wide: list[str] = []
    for one, (costs, controls) in zip(found, known, strict=True):
        if min(costs, controls) < LEAST_ARMS:
            # one that is alone says nothing, and takes what the others say of how arms differ
            few = wide if max(costs, controls) > 1 else narrow
            arms = f"{costs} with failures for the costs, {controls} control"
            few.append(f"{one.strategy} at {one.ranks} ranks ({arms})")
    return [
        f"fewer than {LEAST_ARMS} arms say how arms differ of {', '.join(few)}: {so}"
        for few, so in (
            (narrow, "that is not known at all, and the intervals are too narrow"),
            (
                wide,
                "the intervals are very wide, or too narrow where these are alike by chance",
            ),
        )
        if few
    ]


def _few(one: Compared) -> bool:
    return one.incidents < LEAST_INCIDENTS
