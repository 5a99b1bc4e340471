"""The figures of one strategy at one size, by both engines, each with how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trainchaos.harness.projection.arrivals import Floats, Poisson
from trainchaos.harness.projection.job import formula, job_of, often, paid
from trainchaos.harness.projection.parallel import Part
from trainchaos.harness.projection.presets import DAY_S
from trainchaos.harness.projection.result import Z95, Projected, Setting, Spread
from trainchaos.harness.projection.simulate import CLASSES, Job, Outcome, simulate

OF_FAILURES = ("rework", "restart", "stall", "waiting", "reduced")
"""Classes of badput that there are not without failures."""


def one(part: Part, each: Callable[[float], None]) -> Projected:
    """Project one strategy to one size. ``each``: is told the share that is done."""
    setting, gpus, cost = part.setting, part.gpus, part.cost
    job = job_of(setting, gpus, cost)
    horizon_s = setting.days * DAY_S
    random = np.random.default_rng([setting.seed, gpus, *cost.strategy.encode()])
    played = simulate(job, horizon_s, setting.trials, random, each)
    share = paid(setting, job)
    hours = job.nodes * setting.gpus_per_node * share * horizon_s / 3600.0
    figures = _figures(part, job, played, share, hours)
    spreads = {name: figure.spread for name, figure in figures.items()}
    spreads["finish_days"] = _finish(setting.days, spreads.pop("kept"))
    goodput, failures, price = figures["goodput"], figures["failures"], setting.price
    badput = {name: figures[f"badput.{name}"].mean for name in CLASSES}
    closed, why = formula(setting, job)
    kept = figures["kept"].mean
    sure = spreads.pop("goodput")
    return Projected(
        strategy=cost.strategy,
        gpus=gpus,
        nodes=job.nodes,
        mtbf_s=often(setting, job.nodes),
        interval_s=job.segment_s,
        stall_s=job.stall.median_s,
        recovery_s=_recovery_s(setting, job, played),
        goodput=goodput.mean,
        error=goodput.error,
        low=sure.low or 0.0,
        high=sure.high or 0.0,
        worst=sure.least or 0.0,
        best=sure.most or 0.0,
        closed=closed,
        why=why,
        badput={**badput, "spares": 1 - 1 / share},
        failures=failures.mean,
        ettr=figures["ettr"].mean,
        finish_days=setting.days / kept if kept > 0 else None,
        again=figures["again"].mean,
        short=figures["short"].mean,
        lost_gpu_hours=figures["lost_gpu_hours"].mean,
        gpu_hours=hours,
        price=None if price is None else price * hours,
        lost_price=None if price is None else figures["lost_price"].mean,
        second_gpu_hours=figures["second_gpu_hours"].mean,
        second_price=None if price is None else figures["second_price"].mean,
        spreads=spreads,
    )


def _figures(
    part: Part, job: Job, played: Outcome, share: float, hours: float
) -> dict[str, _Figure]:
    """All that trials differ in, by name. ``share``: nodes that are paid for, for each of the job;
    ``hours``: GPU-hours that are.
    """
    setting = part.setting
    lost = _lost(setting, played)
    # the mean recovery may be as much longer or shorter, with each failure
    stalls = float((played.failures + played.swaps).mean())
    stalled = stalls * job.stall.mean_s / played.horizon_s / share
    longer = part.cost.unsure * stalled
    # failures come while the job runs: with a rate that is r higher they take r (1 - c) more of a
    # share c of the time, and of each other share r c less is left (to the first order)
    caused = _caused(lost, played)
    rate = setting.rate_unsure * (1.0 - caused)
    useful = _of(_useful(played, lost), 1.0)
    unsure = math.hypot(longer, setting.rate_unsure * caused * useful.mean / share)
    steps = played.horizon_s / job.step_s
    goodput = useful.by(1.0 / share, unsure)
    found = {
        "goodput": goodput,
        "failures": _of(played.failures).as_rate(rate),
        "ettr": goodput.by(share),
        "again": _of(played.lost_s["rework"] / job.step_s).as_rate(rate),
        "short": _of(_short_s(job, played) / job.step_s).by(1.0, unsure * share * steps),
        "kept": _of(played.useful_s / (_busy(job) * played.horizon_s), 1.0).by(1.0, unsure * share),
        "lost_gpu_hours": goodput.less_than(1.0).by(hours),
    }
    worth = _of(_second_of_each(played)).by(hours / share).as_rate(rate)
    exact = _second(part, job, played) * hours
    found["second_gpu_hours"] = worth.by(exact / worth.mean) if worth.mean > 0 else worth
    for name, times_s in lost.items():
        whole = _of(times_s / played.horizon_s, 1.0).by(1.0 / share, longer * (name == "stall"))
        found[f"badput.{name}"] = whole.as_rate(rate * (name in OF_FAILURES))
    if setting.price is not None:
        for name in ("lost", "second"):
            found[f"{name}_price"] = found[f"{name}_gpu_hours"].by(setting.price)
    return found


@dataclass(frozen=True)
class _Figure:
    """Mean, its standard error, half of its 95 % interval, and 5 and 95 % of the trials. It can be
    from ``bottom`` to ``top``.
    """

    mean: float
    error: float
    half: float
    least: float
    most: float
    top: float = math.inf
    bottom: float = 0.0

    def by(self, factor: float, unsure: float = 0.0) -> _Figure:
        """So many times as much, with a mean that may then be off by ``unsure`` for other reasons
        than chance.
        """
        return _Figure(
            mean=self.mean * factor,
            error=self.error * factor,
            half=math.hypot(self.half * factor, unsure),
            least=self.least * factor,
            most=self.most * factor,
            top=self.top * factor,
            bottom=self.bottom * factor,
        )

    def as_rate(self, unsure: float) -> _Figure:
        """Of what is as the rate of failures, of which such a share is unknown."""
        return replace(self, half=math.hypot(self.half, unsure * self.mean))

    def less_than(self, total: float) -> _Figure:
        """What is left of ``total``."""
        return _Figure(
            mean=total - self.mean,
            error=self.error,
            half=self.half,
            least=total - self.most,
            most=total - self.least,
            top=total - self.bottom,
            bottom=total - self.top,
        )

    @property
    def spread(self) -> Spread:
        """For results."""
        return Spread(
            low=max(self.bottom, self.mean - self.half),
            high=min(self.top, self.mean + self.half),
            least=self.least,
            most=self.most,
        )


def _of(values: Floats, top: float = math.inf) -> _Figure:
    """Of what each trial has."""
    least, most = np.percentile(values, [5, 95])
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return _Figure(float(values.mean()), error, Z95 * error, float(least), float(most), top)


def _lost(setting: Setting, played: Outcome) -> dict[str, Floats]:
    """Class -> time that is not useful by the definitions of the setting, of each trial."""
    said = setting.definitions
    lost = {name: played.lost_s[name] for name in CLASSES}
    nothing = np.zeros_like(played.useful_s)
    if said.rework == "recovery":
        lost["stall"] = lost["stall"] + lost["rework"]
    if said.rework != "apart":
        lost["rework"] = nothing
    if said.missing == "useful":
        lost["reduced"] = nothing
    return lost


def _caused(lost: Mapping[str, Floats], played: Outcome) -> float:
    """Share of the time of the job's nodes that failures take."""
    return math.fsum(float(lost[name].mean()) for name in OF_FAILURES) / played.horizon_s


def _useful(played: Outcome, lost: Mapping[str, Floats]) -> Floats:
    """Share of the time of the job's nodes that is not in ``lost``, of each trial."""
    return np.asarray(1.0 - np.sum(list(lost.values()), axis=0) / played.horizon_s)


def _busy(job: Job) -> float:
    """Share of running time that is not saving."""
    return job.segment_s / (job.segment_s + job.save_s)


def _short_s(job: Job, played: Outcome) -> Floats:
    """Work that failures kept from being done: of what the days have room for beside saving."""
    return np.maximum(_busy(job) * played.horizon_s - played.useful_s, 0.0)


def _second_of_each(played: Outcome) -> Floats:
    """Of each trial, about what a second of each failure is worth; how much jobs differ in it."""
    return played.useful_s * played.failures / played.horizon_s**2


def _second(part: Part, job: Job, played: Outcome) -> float:
    """Goodput that a second more of each failure's detection costs. By the formulas, where there
    are any, between half a second less and half a second more; with failures by the clock at a
    constant rate, failures that are due during a stall of D come as one at its end, so that goodput
    is c A / (D + A) with A = M e^(-D / M), and its derivative -goodput (1 + D / M) / (D + A).
    Else as if what is free were spent as the rest is: goodput by the time between failures.
    """
    setting, mean_s = part.setting, job.stall.mean_s
    half_s = min(0.5, mean_s)
    less, more = (
        formula(setting, replace(job, stall=job.stall.longer(by_s)))[0] for by_s in (-half_s, 0.5)
    )
    if less is not None and more is not None:
        return (less - more) / (half_s + 0.5)
    useful = float(_useful(played, _lost(setting, played)).mean()) / paid(setting, job)
    if job.wall and isinstance(job.between, Poisson):
        ratio = mean_s / job.between.mean_s
        after_s = job.between.mean_s * math.exp(-ratio)
        return useful * (1.0 + ratio) / (mean_s + after_s)
    return useful * float(played.failures.mean()) / played.horizon_s


def _recovery_s(setting: Setting, job: Job, played: Outcome) -> float:
    """Mean time that a failure takes. Swaps of slow nodes stall as failures do."""
    failures, stalls = float(played.failures.sum()), float((played.failures + played.swaps).sum())
    if failures == 0.0:
        return job.stall.mean_s + job.restart_s
    taken_s = float(played.lost_s["restart"].sum())
    if setting.definitions.rework == "recovery":
        taken_s += float(played.lost_s["rework"].sum())
    return float(played.lost_s["stall"].sum()) / stalls + taken_s / failures


def _finish(days: float, kept: Spread) -> Spread:
    """Days until as much is done as in ``days`` without a failure; ``kept``: that share of it."""

    def after(share: float | None) -> float | None:
        return days / share if share else None

    return Spread(
        low=after(kept.high), high=after(kept.low), least=after(kept.most), most=after(kept.least)
    )
