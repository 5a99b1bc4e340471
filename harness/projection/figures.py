"""The figures of one strategy at one size, by both engines, each with how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from trainchaos.harness.projection.arrivals import Floats
from trainchaos.harness.projection.job import formula, job_of, often, paid
from trainchaos.harness.projection.parallel import Part
from trainchaos.harness.projection.presets import DAY_S
from trainchaos.harness.projection.result import Z95, Projected, Setting, Spread
from trainchaos.harness.projection.simulate import CLASSES, Job, Outcome, simulate


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
    spreads["finish_days"] = _finish(setting.days, spreads["ettr"])
    goodput, failures, price = figures["goodput"], figures["failures"], setting.price
    badput = {name: figures[f"badput.{name}"].mean for name in CLASSES}
    closed, why = formula(setting, job)
    ettr = figures["ettr"].mean
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
        ettr=ettr,
        finish_days=setting.days / ettr if ettr > 0 else None,
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
    stalled = float(played.failures.mean()) * job.stall.mean_s / played.horizon_s / share
    unsure = part.cost.unsure * stalled
    goodput = _of(_useful(played, lost), 1.0).by(1.0 / share, unsure)
    found = {
        "goodput": goodput,
        "failures": _of(played.failures),
        "ettr": goodput.by(share),
        "again": _of(played.lost_s["rework"] / job.step_s),
        "short": _of(_short_s(job, played) / job.step_s),
        "lost_gpu_hours": goodput.less_than(1.0).by(hours),
        "second_gpu_hours": _of(_second(setting, played)).by(hours / share),
    }
    for name, times_s in lost.items():
        whole = _of(times_s / played.horizon_s, 1.0)
        found[f"badput.{name}"] = whole.by(1.0 / share, unsure if name == "stall" else 0.0)
    if setting.price is not None:
        for name in ("lost", "second"):
            found[f"{name}_price"] = found[f"{name}_gpu_hours"].by(setting.price)
    return found


@dataclass(frozen=True)
class _Figure:
    """Mean, its standard error, half of its 95 % interval, and 5 and 95 % of the trials. It can be
    from 0 to ``top``.
    """

    mean: float
    error: float
    half: float
    least: float
    most: float
    top: float = math.inf

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
        )

    def less_than(self, total: float) -> _Figure:
        """What is left of ``total``."""
        return _Figure(
            mean=total - self.mean,
            error=self.error,
            half=self.half,
            least=total - self.most,
            most=total - self.least,
            top=total,
        )

    @property
    def spread(self) -> Spread:
        """For results."""
        return Spread(
            low=max(0.0, self.mean - self.half),
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


def _useful(played: Outcome, lost: Mapping[str, Floats]) -> Floats:
    """Share of the time of the job's nodes that is not in ``lost``, of each trial."""
    return np.asarray(1.0 - np.sum(list(lost.values()), axis=0) / played.horizon_s)


def _short_s(job: Job, played: Outcome) -> Floats:
    """Work that failures kept from being done: of what the days have room for beside saving."""
    busy = job.segment_s / (job.segment_s + job.save_s)
    return np.maximum(busy * played.horizon_s - played.useful_s, 0.0)


def _second(setting: Setting, played: Outcome) -> Floats:
    """Share of the time of the job's nodes that a second less of each failure's detection makes
    useful: as much time is free once for each failure, and is spent as the rest is. Derived from
    goodput = c M / (M + D), so that -d/dD = goodput / (M + D), and failures / T = 1 / (M + D);
    where failures come by the clock, they are 1 / M, and the time that is free has no fewer.
    """
    useful = _useful(played, _lost(setting, played))
    worth = useful * played.failures / played.horizon_s
    if setting.definitions.failures_while == "always":
        going = 1.0 - played.lost_s["stall"] / played.horizon_s
        return np.asarray(np.where(going > 0.0, worth / np.maximum(going, 1e-12), 0.0))
    return np.asarray(worth)


def _recovery_s(setting: Setting, job: Job, played: Outcome) -> float:
    """Mean time that a failure takes."""
    failures = float(played.failures.sum())
    if failures == 0.0:
        return job.stall.mean_s + job.restart_s
    taken_s = played.lost_s["stall"].sum() + played.lost_s["restart"].sum()
    if setting.definitions.rework == "recovery":
        taken_s += played.lost_s["rework"].sum()
    return float(taken_s) / failures


def _finish(days: float, ettr: Spread) -> Spread:
    """Days until as much is done as in ``days`` without a failure; the most for the least ETTR."""

    def after(share: float | None) -> float | None:
        return days / share if share else None

    return Spread(
        low=after(ettr.high), high=after(ettr.low), least=after(ettr.most), most=after(ettr.least)
    )
