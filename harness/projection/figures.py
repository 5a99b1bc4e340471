"""The figures of one strategy at one size, by both engines, each with how sure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainchaos.harness.projection.costs import RecoveryCost
from trainchaos.harness.projection.job import formula, job_of, often, paid
from trainchaos.harness.projection.laws import Floats, Law
from trainchaos.harness.projection.presets import DAY_S
from trainchaos.harness.projection.result import Projected, Setting, Spread, engines_differ, t95
from trainchaos.harness.projection.simulate import CLASSES, Job, Outcome, simulate

DRAWN = 100_000
"""Times between failures, of a law without a formula."""
MOST_REPAIRS = 1 << 26
"""Entries of the table of repairs (a node and trial each) that are in memory at once."""


@dataclass(frozen=True)
class Part:
    """One strategy at one size."""

    setting: Setting
    gpus: int
    cost: RecoveryCost


@dataclass(frozen=True)
class _Figure:
    """What each trial has. The mean may be off by ``unsure`` for other reasons than chance, and can
    be from ``bottom`` to ``top``.
    """

    values: Floats
    unsure: float = 0.0
    bottom: float = 0.0
    top: float = math.inf

    @property
    def mean(self) -> float:
        """Of all trials."""
        return float(self.values.mean())

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(self.values.std(ddof=1)) / math.sqrt(len(self.values))

    def spread(self, more: float) -> Spread:
        """Where the mean may be off by ``more`` besides."""
        least, most = np.percentile(self.values, [5, 95])
        half = math.hypot(t95(len(self.values) - 1) * self.error, self.unsure, more)
        low, high = max(self.bottom, self.mean - half), min(self.top, self.mean + half)
        return Spread(low=low, high=high, least=float(least), most=float(most))


def projected(part: Part) -> Projected:
    """Project one strategy to one size."""
    setting, cost = part.setting, part.cost
    job = job_of(setting, part.gpus, cost)
    played = _played(part, job)
    figures = _figures(part, job, played)
    doubts = _doubts(part, job)
    mean = {name: figure.mean for name, figure in figures.items()}
    spreads = {name: figure.spread(doubts.get(name, 0.0)) for name, figure in figures.items()}
    goodput, kept = spreads.pop("goodput"), spreads.pop("kept")
    spreads["finish_days"] = _finish(setting.days, kept)
    share, why = formula(setting, job)
    hours = _hours(setting, job)
    badput = {name: mean.pop(f"badput.{name}") for name in CLASSES}
    kept_share = mean.pop("kept")
    return Projected(
        strategy=cost.strategy,
        gpus=part.gpus,
        nodes=job.nodes,
        mtbf_s=often(setting, job.nodes),
        interval_s=job.segment_s,
        stall_s=job.stall.median_s,
        recovery_s=_recovery_s(setting, job, played),
        error=figures["goodput"].error,
        low=goodput.low or 0.0,
        high=goodput.high or 0.0,
        worst=goodput.least or 0.0,
        best=goodput.most or 0.0,
        closed=share,
        why=why,
        badput={**badput, "spares": 1 - 1 / paid(setting, job)},
        finish_days=setting.days / kept_share if kept_share > 0 else None,
        gpu_hours=hours,
        price=None if setting.price is None else setting.price * hours,
        spreads=spreads,
        **mean,
    )


def _played(part: Part, job: Job) -> Outcome:
    """Its trials, with the chance of the seed, the size and the strategy."""
    setting = part.setting
    random = np.random.default_rng([setting.seed, part.gpus, *part.cost.strategy.encode()])
    most = max(2, MOST_REPAIRS // job.nodes)
    counts = [most] * (setting.trials // most) + [setting.trials % most]
    parts = [simulate(job, setting.days * DAY_S, n, random) for n in counts if n]
    return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: list[Outcome]) -> Outcome:
    arrays = ("useful_s", "failures", "nodes_lost", "quarantined", "swaps")
    return Outcome(
        horizon_s=parts[0].horizon_s,
        lost_s={name: np.concatenate([p.lost_s[name] for p in parts]) for name in CLASSES},
        **{name: np.concatenate([getattr(p, name) for p in parts]) for name in arrays},
    )


def _hours(setting: Setting, job: Job) -> float:
    """GPU-hours that are paid for."""
    return job.nodes * setting.gpus_per_node * paid(setting, job) * setting.days * DAY_S / 3600.0


def _doubts(part: Part, job: Job) -> dict[str, float]:
    """What is unknown of the rate, in each figure: half of how far jobs are apart that have the
    rates at both ends of its own, by the same chance and with the same checkpoints.
    """
    setting, ends = part.setting, []
    if not setting.rate_unsure:
        return {}
    for times in (1.0 + setting.rate_unsure, 1.0 / (1.0 + setting.rate_unsure)):
        update = {"rate": setting.rate * times, "interval_s": job.segment_s}
        end = Part(setting.model_copy(update=update), part.gpus, part.cost)
        other = job_of(end.setting, part.gpus, part.cost)
        ends.append(_figures(end, other, _played(end, other)))
    more, fewer = ends
    return {name: abs(more[name].mean - fewer[name].mean) / 2 for name in more}


def _figures(part: Part, job: Job, played: Outcome) -> dict[str, _Figure]:
    """All that trials differ in, by name."""
    setting, horizon_s = part.setting, played.horizon_s
    nodes, hours, room_s = paid(setting, job), _hours(setting, job), job.busy * played.horizon_s
    lost = _lost(setting, played)
    ettr = 1.0 - np.sum(list(lost.values()), axis=0) / horizon_s
    # the mean recovery may be as much longer or shorter, with each failure
    unsure = part.cost.unsure_s * float((played.failures + played.swaps).mean()) / horizon_s
    goodput = _Figure(ettr / nodes, unsure / nodes, top=1.0 / nodes)
    lost_hours = hours * (1.0 - ettr / nodes)
    second = _second(part, job, played, goodput) * hours
    each = played.useful_s * played.failures  # about what a second is worth in each trial
    worth = second * each / each.mean() if each.any() else each
    short_s = np.maximum(room_s - played.useful_s, 0.0)
    money = {} if setting.price is None else {"price": setting.price}
    figures = {
        "goodput": goodput,
        "failures": _Figure(played.failures),
        "ettr": _Figure(ettr, unsure, top=1.0),
        "again": _Figure(played.lost_s["rework"] / job.step_s),
        "short": _Figure(short_s / job.step_s, unsure * horizon_s / job.step_s),
        "kept": _Figure(played.useful_s / room_s, unsure / job.busy, top=1.0),
    }
    for unit, price in {"gpu_hours": 1.0, **money}.items():
        all_hours, spares = hours * price, (1.0 - 1.0 / nodes) * hours * price
        figures[f"lost_{unit}"] = _Figure(
            lost_hours * price, unsure / nodes * all_hours, bottom=spares, top=all_hours
        )
        figures[f"second_{unit}"] = _Figure(worth * price)
    for name, times_s in lost.items():
        doubt = unsure / nodes if name == "stall" else 0.0
        figures[f"badput.{name}"] = _Figure(times_s / horizon_s / nodes, doubt, top=1.0 / nodes)
    return figures


def _lost(setting: Setting, played: Outcome) -> dict[str, Floats]:
    """Class -> time that is not useful by the definitions of the setting, of each trial."""
    words, lost = setting.definitions, dict(played.lost_s)
    nothing = np.zeros_like(played.useful_s)
    if words.rework == "recovery":
        lost["stall"] = lost["stall"] + lost["rework"]
    if words.rework != "apart":
        lost["rework"] = nothing
    if words.missing == "useful":
        lost["reduced"] = nothing
    return lost


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
    exact, less, more = (formula(setting, job, by_s)[0] for by_s in (0.0, -half_s, 0.5))
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
    if law.constant:
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
    least, most, low, high = (
        days / share if share else None for share in (kept.most, kept.least, kept.high, kept.low)
    )
    return Spread(low=low, high=high, least=least, most=most)
