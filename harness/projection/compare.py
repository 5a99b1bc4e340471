"""Projected against measured goodput: the very job of stored runs, under its own failures.

The costs of a recovery are from other arms than those that are compared, so that no arm is
projected from itself. Control arms have no fault, and so are used for both. Arms that are compared
are drawn as they could be by all that is known from the others (a predictive distribution): for
each draw another mean and another spread, as so few values leave open.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.projection.costs import LEAST_INCIDENTS, PUBLISHED
from trainchaos.harness.projection.laws import Duration, Floats
from trainchaos.harness.projection.observed import (
    Group,
    Stored,
    groups,
    law_of_failures,
    refuse_several,
    unfinished,
)
from trainchaos.harness.projection.result import Compared, t95
from trainchaos.harness.projection.simulate import Job, simulate

LEAST_ARMS = 3
"""From two, Student's t is 12.7 deviations wide, which says nearly nothing of how arms differ."""
DRAWS = 4000
"""Groups of arms that are drawn; they give the ends of a 95 % interval within 0.25 % of cases."""
USUAL = 2000
"""Arms that are played with all costs as they were measured."""
LEAST = 0.1
"""Of the measured mean recovery: the least that it is drawn as."""


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
    ids = {run.results.run_id for run in runs}
    if twice := sorted(ids & {run.results.run_id for run in others}):
        raise ScenarioError(
            f"run {twice[0]} is in both --runs and --compare: it would be compared with itself",
            hint="leave --runs out to take the costs from half of its arms",
        )
    names = {run.results.scenario for run in (*runs, *others)}
    refuse_several(names, "costs of another job are no measure of this one")
    repeats = {arm.repeat for run in runs for arm in run.results.arms}
    source = groups(others) if others else groups(runs, [n for n in repeats if n % 2 == 0])
    asked = groups(runs, None if others else [n for n in repeats if n % 2 == 1])
    if not asked:
        raise ScenarioError(
            "no run has a strategy that can be projected", hint=f"there are {', '.join(PUBLISHED)}"
        )
    rows: list[Compared] = []
    cautions: list[str] = []
    for key, group in asked.items():
        costs = source.get(key)
        _refuse(costs, group, "the runs of --runs" if others else "the arms of even repeats")
        assert costs is not None
        from_what = "other runs" if others else "arms of even repeats"
        random = np.random.default_rng([seed, group.ranks, *group.strategy.encode()])
        rows.append(compared(group, costs, from_what, random))
        cautions += _cautions(group, costs)
        each(len(rows) / len(asked))
    if left := unfinished(runs):
        cautions.append(f"arms that did not complete are left out: {', '.join(left)}")
    return rows, cautions


def _refuse(source: Group | None, group: Group, place: str) -> None:
    """``source``: the group that the costs are from."""
    if not group.controls:
        raise ScenarioError(
            f"{group.name}: no control arm says how the job goes without failures",
            hint="run the scenario with baseline: paired",
        )
    if not group.faulted:
        raise ScenarioError(
            f"{group.name}: no arm to compare with", hint="run with --repeat 2 or more"
        )
    if source is None or source.failures == 0 or not source.stalls_s:
        raise ScenarioError(
            f"{group.name}: no recovery in {place} says what one costs",
            hint="run with more repeats, or give --runs of the same scenario",
        )


def job_of(group: Group, source: Group) -> Job:
    """The job of a group, a node for each rank, with the costs of another. What saves and all else
    take without failures (the control arms) is taken as time that checkpoints hold the job up.
    """
    scenario = group.cell.scenario
    kind = PUBLISHED[group.strategy]
    step_s = statistics.fmean(arm.step_s for arm in group.controls)
    every = scenario.workload.checkpoint.every
    segment_s = step_s * (every if isinstance(every, int) else scenario.workload.steps)
    away_s = statistics.fmean(source.away_s) if source.away_s else 0.0
    stall = stall_of_group(source)
    spares = int(scenario.recovery.params.get("spares", 1)) if kind.strategy == "hot-spare" else 0
    return Job(
        nodes=group.ranks,
        between=law_of_failures(group.cell),
        wall=True,
        slowing=_slowing(source, away_s, stall.mean_s),
        rollback=kind.rollback,
        segment_s=segment_s,
        save_s=segment_s * (1.0 / group.undisturbed - 1.0),
        step_s=step_s,
        restart_s=0.0,
        stall=stall,
        spares=None if kind.rollback or away_s <= 0 else spares,
        repair=Duration(median_s=away_s),
    )


def stall_of_group(source: Group) -> Duration:
    """Mean: all time from failures until the job trained again, by failures, so that recoveries
    that overlap count once and pauses to take a replacement in count too; spread: of those alone.
    """
    mean_s = math.fsum(arm.stalled_s for arm in source.faulted) / source.failures
    logs = [math.log(stall_s) for stall_s in source.stalls_s]
    sigma = statistics.stdev(logs) if len(logs) >= LEAST_INCIDENTS else 0.0
    return Duration(median_s=mean_s / math.exp(sigma**2 / 2), sigma=sigma)


def _slowing(source: Group, away_s: float, stall_s: float) -> float:
    """Time that was lost to missing ranks, by the time that would have been if each computed for
    itself. Ranks that share processors lose less: the rest gets those of the missing one.
    """
    missing_s = source.failures * max(0.0, away_s - stall_s) / source.ranks
    lost_s = math.fsum(arm.degraded_s for arm in source.faulted)
    return min(1.0, lost_s / missing_s) if missing_s > 0 else 1.0


def compared(
    group: Group, source: Group, from_what: str, random: np.random.Generator, draws: int = DRAWS
) -> Compared:
    """A group beside its projection from the costs of ``source``. Raises ScenarioError as
    ``simulate``.
    """
    job, count, base = job_of(group, source), len(group.faulted), group.undisturbed
    work_s = group.cell.scenario.workload.steps * job.step_s / job.busy
    first = float(simulate(job, work_s, USUAL, random).goodput.mean())
    horizon_s = work_s * base / max(first, 0.05)
    usual = simulate(job, horizon_s, USUAL, random)
    slower = np.exp(np.minimum(_slower(source) or [0.0], 0.0))
    times = _recoveries(source, random, draws, count).ravel()
    played = simulate(replace(job, stall_times=times), horizon_s, draws * count, random).goodput
    means = (played.reshape(draws, count) * _others(group, source, random, draws)).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    measured = [arm.goodput for arm in group.faulted]
    center, half = statistics.fmean(measured), scatter_of(measured).error
    return Compared(
        strategy=group.strategy,
        ranks=group.ranks,
        projected=float(usual.goodput.mean() * slower.mean()),
        low=float(low),
        high=float(high),
        measured=measured,
        measured_low=None if count < 2 else max(0.0, center - half),
        measured_high=None if count < 2 else min(1.0, center + half),
        failures_projected=float(usual.failures.mean()),
        failures_measured=statistics.fmean(arm.failures for arm in group.faulted),
        mtbf_s=job.between.mean_s,
        stall_s=job.stall.mean_s,
        away_s=job.repair.median_s,
        incidents=source.failures,
        undisturbed=base,
        costs_from=from_what,
    )


def _cautions(group: Group, source: Group) -> list[str]:
    """Where too little is known of a job."""
    cautions = []
    if source.failures < LEAST_INCIDENTS:
        cautions.append(
            f"fewer than {LEAST_INCIDENTS} incidents say what a recovery costs of {group.name}"
            f" ({source.failures}): the intervals are too narrow"
        )
    most = group.cell.scenario.faults[0].at.max
    if most is not None and any(arm.failures >= most for arm in group.faulted):
        cautions.append(
            f"{group.name} had the most failures that its scenario allows ({most}), fewer than its"
            " rate says"
        )
    # how arms with failures differ from their control arms, and control arms from one another
    costs, controls = len(_slower(source)), len(group.controls)
    if min(costs, controls) < LEAST_ARMS:
        # one that is alone says nothing, and takes what the others say of how arms differ
        so = "that is not known at all, and the intervals are too narrow"
        if max(costs, controls) > 1:
            so = "the intervals are very wide, or too narrow where these are alike by chance"
        cautions.append(
            f"fewer than {LEAST_ARMS} arms say how arms differ of {group.name} ({costs} with"
            f" failures for the costs, {controls} control): {so}"
        )
    return cautions


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """How values differ by chance: their standard deviation ``spread``, known with so many
    ``degrees`` of freedom (0: it is not, and is taken as none), and their mean from ``count``.
    """

    spread: float
    count: int
    degrees: int

    @property
    def error(self) -> float:
        """Half the 95 % interval of the mean, by Student's t; 0 where the spread is not known."""
        return t95(self.degrees) * self.spread / math.sqrt(self.count) if self.degrees else 0.0

    def draw(self, random: np.random.Generator, draws: int) -> tuple[Floats, Floats]:
        """How far the true mean is from that of the values, and the true spread; a column each.
        The means are Student's t, as the spread is by chi-squared.
        """
        if not self.degrees:
            return np.zeros((draws, 1)), np.zeros((draws, 1))
        shares = random.chisquare(self.degrees, (draws, 1)) / self.degrees
        spreads = self.spread / np.sqrt(shares)
        return spreads / math.sqrt(self.count) * random.standard_normal((draws, 1)), spreads


def scatter_of(values: Sequence[float]) -> Scatter:
    """That of values, which their mean is from."""
    count = len(values)
    spread = statistics.stdev(values) if count > 1 else 0.0
    return Scatter(spread=spread, count=max(1, count), degrees=max(0, count - 1))


def _recoveries(source: Group, random: np.random.Generator, draws: int, count: int) -> Floats:
    """Mean recovery of each arm, by that of all incidents. A busy minute slows all recoveries of an
    arm, so that many incidents of few arms say less than as many of many: of the two, what leaves
    more open is taken.
    """
    arms_s = [arm.stalled_s / arm.failures for arm in source.faulted if arm.failures]
    by_incident, by_arm = (
        scatter_of([one / (statistics.fmean(times_s) or 1.0) for one in times_s])
        for times_s in (source.stalls_s, arms_s)
    )
    if by_incident.error >= by_arm.error:
        times = 1.0 + by_incident.draw(random, draws)[0] + np.zeros((draws, count))
    else:
        of_mean, spreads = by_arm.draw(random, draws)
        played = (
            math.expm1(stall_of_group(source).sigma ** 2) * len(arms_s) / source.failures
        )  # variance of an arm's mean
        own = np.sqrt(np.maximum(0.0, spreads**2 - played))
        times = 1.0 + of_mean + own * random.standard_normal((draws, count))
    return np.maximum(LEAST, times)


def _slower(source: Group) -> list[float]:
    """Logarithms of what arms with failures did of their time beside recoveries, by what their
    control arms did: a replacement that starts takes processors from ranks that train, in some
    steps much and in most of them nothing, so that medians of steps would not have it.
    """
    usual = {(arm.run, arm.repeat): arm.clear for arm in source.controls if arm.clear > 0}
    return [
        math.log(arm.clear / usual[key])
        for arm in source.faulted
        if arm.clear > 0 and (key := (arm.run, arm.repeat)) in usual
    ]


def _others(group: Group, source: Group, random: np.random.Generator, draws: int) -> Floats:
    """By what arms differ for other reasons than failures: as control arms do from one another, and
    arms with failures from their control arms; one that is faster than its control earns no more.
    """
    base = group.undisturbed
    slower = _slower(source)
    shares = [math.log(arm.goodput / base) for arm in group.controls if arm.goodput > 0]
    steps, controls = scatter_of(slower), scatter_of(shares)
    if not steps.degrees:  # of the same job and machine
        steps = replace(controls, count=steps.count)
    elif not controls.degrees:
        controls = replace(steps, count=controls.count)
    shape = (draws, len(group.faulted))
    center = statistics.fmean(slower) if slower else 0.0
    total = np.zeros(shape)
    for kind, middle, most in ((steps, center, 0.0), (controls, 0.0, -math.log(base))):
        of_mean, spreads = kind.draw(random, draws)
        logs = middle + of_mean + spreads * random.standard_normal(shape)
        total += np.minimum(logs, most)
    return np.exp(total)
