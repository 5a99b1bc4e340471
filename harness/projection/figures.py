"""The figures of one strategy at one size, by both engines, each with how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trainchaos.harness.projection.arrivals import Floats, Law, Poisson
from trainchaos.harness.projection.job import formula, job_of, often, paid
from trainchaos.harness.projection.parallel import Part
from trainchaos.harness.projection.presets import DAY_S
from trainchaos.harness.projection.result import Projected, Setting, Spread, engines_differ, t95
from trainchaos.harness.projection.simulate import CLASSES, Job, Outcome, simulate

DRAWN = 100_000
"""Times between failures, of a law without a formula."""


def one(part: Part, each: Callable[[float], None]) -> Projected:
    """Project one strategy to one size. ``each``: is told the share that is done."""
    setting, gpus, cost = part.setting, part.gpus, part.cost
    job = job_of(setting, gpus, cost)
    played = _played(part, job, each)
    share = paid(setting, job)
    hours = _hours(setting, job)
    figures = _with_rate(part, job, _figures(part, job, played))
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


def _played(part: Part, job: Job, each: Callable[[float], None]) -> Outcome:
    """Its trials, with the chance of the seed, the size and the strategy."""
    setting = part.setting
    random = np.random.default_rng([setting.seed, part.gpus, *part.cost.strategy.encode()])
    return simulate(job, setting.days * DAY_S, setting.trials, random, each)


def _hours(setting: Setting, job: Job) -> float:
    """GPU-hours that are paid for."""
    return job.nodes * setting.gpus_per_node * paid(setting, job) * setting.days * DAY_S / 3600.0


def _with_rate(part: Part, job: Job, figures: Mapping[str, _Figure]) -> dict[str, _Figure]:
    """With what is unknown of the rate in their intervals: half of how far jobs are apart that have
    the rates at both ends of its own, by the same chance and with the same checkpoints.
    """
    setting, cost = part.setting, part.cost
    if not setting.rate_unsure:
        return dict(figures)
    ends = []
    for times in (1.0 + setting.rate_unsure, 1.0 / (1.0 + setting.rate_unsure)):
        more = {"rate": setting.rate * times, "interval_s": job.segment_s}
        there = Part(setting.model_copy(update=more), part.gpus, cost)
        other = job_of(there.setting, part.gpus, cost)
        ends.append(_figures(there, other, _played(there, other, lambda share: None)))
    return {
        name: replace(figure, half=math.hypot(figure.half, _half(*(end[name] for end in ends))))
        for name, figure in figures.items()
    }


def _half(one: _Figure, other: _Figure) -> float:
    return abs(one.mean - other.mean) / 2


def _figures(part: Part, job: Job, played: Outcome) -> dict[str, _Figure]:
    """All that trials differ in, by name."""
    setting = part.setting
    share, hours = paid(setting, job), _hours(setting, job)
    lost = _lost(setting, played)
    # the mean recovery may be as much longer or shorter, with each failure
    stalls = float((played.failures + played.swaps).mean())
    unsure = part.cost.unsure_s * stalls / played.horizon_s
    steps = played.horizon_s / job.step_s
    goodput = _of(_useful(played, lost), 1.0).by(1.0 / share, unsure / share)
    found = {
        "goodput": goodput,
        "failures": _of(played.failures),
        "ettr": goodput.by(share),
        "again": _of(played.lost_s["rework"] / job.step_s),
        "short": _of(_short_s(job, played) / job.step_s).by(1.0, unsure * steps),
        "kept": _of(played.useful_s / (_busy(job) * played.horizon_s), 1.0).by(
            1.0, unsure / _busy(job)
        ),
        "lost_gpu_hours": goodput.less_than(1.0).by(hours),
    }
    worth = _of(_second_of_each(played)).by(hours / share)
    exact = _second(part, job, played, goodput) * hours
    found["second_gpu_hours"] = worth.by(exact / worth.mean) if worth.mean > 0 else worth
    for name, times_s in lost.items():
        whole = _of(times_s / played.horizon_s, 1.0)
        found[f"badput.{name}"] = whole.by(1.0 / share, unsure / share * (name == "stall"))
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
    half = t95(len(values) - 1) * error
    return _Figure(float(values.mean()), error, half, float(least), float(most), top)


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


def _second(part: Part, job: Job, played: Outcome, goodput: _Figure) -> float:
    """Goodput that a second more of each failure's detection costs. By the formulas, where they
    hold, between half a second less and half a second more; with failures by the clock, those that
    are due during a stall of D come as one at its end, so that goodput is c A / (D + A), where A is
    what a time between failures has beyond D on average, and its derivative
    -goodput (S D + A) / (A (D + A)), where S is the share of such times beyond D.
    Else as if what is free were spent as the rest is: goodput by the time between failures.
    """
    setting, mean_s = part.setting, job.stall.mean_s
    half_s = min(0.5, mean_s)
    exact, less, more = (
        formula(setting, replace(job, stall=job.stall.longer(by_s)))[0]
        for by_s in (0.0, -half_s, 0.5)
    )
    holds = not engines_differ(goodput.mean, goodput.error, exact)
    if less is not None and more is not None and holds:
        return (less - more) / (half_s + 0.5)
    if job.wall:
        left, beyond_s = _beyond(job.between, mean_s)
        if beyond_s > 0:
            return goodput.mean * (left * mean_s + beyond_s) / (beyond_s * (mean_s + beyond_s))
    return goodput.mean * float(played.failures.mean()) / played.horizon_s


def _beyond(law: Law, time_s: float) -> tuple[float, float]:
    """Share of the times between failures that are longer, and what all have beyond on average."""
    if isinstance(law, Poisson):
        left = math.exp(-time_s / law.mean_s)
        return left, law.mean_s * left
    drawn = law.sample(np.random.default_rng(0), DRAWN)
    return float((drawn > time_s).mean()), float(np.maximum(drawn - time_s, 0.0).mean())


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
