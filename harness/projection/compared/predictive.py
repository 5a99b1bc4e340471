"""What a few arms leave open of a job's goodput: the mean recovery, and how arms differ.

Arms that are compared are drawn as they could be by all that is known from the others (a predictive
distribution): for each draw another mean and another spread, as so few values leave open.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainchaos.harness.projection.arrivals import Floats
from trainchaos.harness.projection.durations import Duration
from trainchaos.harness.projection.observed import Group, spread
from trainchaos.harness.projection.result import t95
from trainchaos.harness.projection.simulate import Job, simulate

DRAWS = 4000
"""Groups of arms that are drawn; they give the ends of a 95 % interval within 0.25 % of cases."""
USUAL = 2000
"""Arms that are played with all costs as they were measured."""
LEAST = 0.1
"""Of the measured mean recovery: the least that it is drawn as."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """``goodput``: mean, with all costs as they were measured; ``low``, ``high``: where the mean of
    so many arms is in 95 % of cases; ``failures``: of an arm.
    """

    goodput: float
    low: float
    high: float
    failures: float


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
    return Scatter(spread=spread(values), count=max(1, count), degrees=max(0, count - 1))


def predict(
    group: Group, source: Group, job: Job, random: np.random.Generator, draws: int = DRAWS
) -> Predicted:
    """Goodput of as many arms as ``group`` has, from the costs of ``source``. ``job``: the group's,
    with those costs; ``draws``: of so many arms. Raises TooManyEventsError as ``simulate``.
    """
    count = len(group.faulted)
    base = undisturbed(group)
    work_s = group.cell.scenario.workload.steps * job.step_s * (1 + job.save_s / job.segment_s)
    first = simulate(job, work_s, USUAL, random).goodput.mean()
    horizon_s = work_s * base / max(float(first), 0.05)
    usual = simulate(job, horizon_s, USUAL, random)
    slower = np.exp(np.minimum(_slower(source) or [0.0], 0.0))
    sigma = job.stall.sigma if isinstance(job.stall, Duration) else 0.0
    times = _recoveries(source, sigma, random, draws, count).ravel()
    stall = _Stalls(median_s=job.stall.median_s, sigma=sigma, times=times)
    played = simulate(replace(job, stall=stall), horizon_s, draws * count, random).goodput
    means = (played.reshape(draws, count) * _others(group, source, random, draws)).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Predicted(
        goodput=float(usual.goodput.mean() * slower.mean()),
        low=float(low),
        high=float(high),
        failures=float(usual.failures.mean()),
    )


def undisturbed(group: Group) -> float:
    """Mean goodput of the control arms."""
    return statistics.fmean(arm.goodput for arm in group.controls)


def arms_known(group: Group, source: Group) -> tuple[int, int]:
    """Of how many arms it is known how they differ: arms with failures from their control arms,
    and control arms from one another.
    """
    return len(_slower(source)), len(group.controls)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stalls(Duration):
    """Each trial has its own mean, ``times`` that of all."""

    times: Floats

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        return super().sample(random, count) * self.times


def _recoveries(
    source: Group, sigma: float, random: np.random.Generator, draws: int, count: int
) -> Floats:
    """Mean recovery of each arm, by that of all incidents, which are played with ``sigma``. A busy
    minute slows all recoveries of an arm, so that many incidents of few arms say less than as many
    of many: of the two, what leaves more open is taken.
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
        played = math.expm1(sigma**2) * len(arms_s) / source.failures  # variance of an arm's mean
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
    base = undisturbed(group)
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
