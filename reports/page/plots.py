"""The plots of a run: recovery and wall time as charts, throughput and loss as lines. Each states
its finding as its title and as its text alternative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from trainchaos.chaos.units import enclosing, number, percent, plural, with_unit
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content.facts import incidents_of, median_incident
from trainchaos.reports.content.figures import median_of
from trainchaos.reports.content.series import Pair
from trainchaos.reports.page.charts import (
    Chart,
    Course,
    Point,
    Times,
    courses,
    in_order,
    shares,
    times,
)
from trainchaos.reports.page.svg import (
    FAULT,
    FAULT_WASH,
    GREY_MID,
    INK,
    RECOVERY_WASH,
    Band,
    axes,
    drawing,
    figure,
    to_svg,
)

WIDTH = 400.0  # points
MAX_BANDS = 40
STANDS_OUT = 5.0  # times the usual gap between two steps


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One drawing: an ``<svg>`` element, and the finding it shows."""

    title: str
    svg: str


def recoveries(results: Results, labels: Mapping[str, str]) -> tuple[Chart | None, Chart | None]:
    """Of the cells with ``labels`` every recovery time, and the median incident phase by phase."""
    found = {
        cell: timed
        for cell in labels
        if (timed := [i for i in incidents_of(results, cell) if i.recovery_time is not None])
    }
    if not found:
        return None, None
    metrics = {cell.id: cell.metrics.get("recovery_time") for cell in results.cells}
    points, phases = [], []
    for cell, incidents in found.items():
        metric, typical = metrics[cell], median_incident(results, cell)
        said = median_of(metric, unit=True)
        points.append(
            Times(
                name=labels[cell],
                points=[_point(incident) for incident in incidents],
                median=metric.median if metric else None,
                bounds=metric.ci95 if metric else None,
                value=said,
            )
        )
        if typical is not None and typical.phases:
            phases.append(
                Course(
                    name=labels[cell],
                    phases=typical.phases,
                    ends=typical.recovery_time,
                    words=_which(typical),
                    value=with_unit(typical.recovery_time, "s", "lower"),
                )
            )
    title = _recovery_finding({labels[cell]: incidents for cell, incidents in found.items()})
    course = courses("The incident of median recovery time, phase by phase", phases)
    return times(title, points, logarithmic=False), course if phases else None


def _point(incident: Incident) -> Point:
    seconds = incident.recovery_time or 0.0
    said = f"recovery time {with_unit(seconds, 's', 'lower')}; {_which(incident)}"
    return Point(value=seconds, words=said)


def _which(incident: Incident) -> str:
    return f"faulted arm of {incident.cell}, repeat {incident.repeat}, fault {incident.fault}"


def _recovery_finding(found: Mapping[str, Sequence[Incident]]) -> str:
    medians = {
        label: statistics.median(i.recovery_time or 0.0 for i in mine)
        for label, mine in found.items()
    }
    best, worst = min(medians, key=lambda k: medians[k]), max(medians, key=lambda k: medians[k])
    if math.isinf(medians[best]):
        return "No strategy recovered"
    parts = [f"{best} recovers in {number(medians[best], 'lower')} s"]
    if math.isinf(medians[worst]):
        parts.append(f"{worst} does not recover")
    elif worst != best and medians[best] > 0:
        parts.append(f"{worst} takes {number(medians[worst] / medians[best])} times as long")
    never = sum(math.isinf(i.recovery_time or 0.0) for mine in found.values() for i in mine)
    if never and math.isfinite(medians[worst]):
        parts.append(f"{plural(never, 'incident')} never recovered")
    return "; ".join(parts)


def wall_seconds(results: Results) -> dict[tuple[str, str], dict[str, float]]:
    """Mean seconds of each class of wall time, by (cell, arm kind): in all the wall clock."""
    known = {cell.id: n for n, cell in enumerate(results.cells)}
    keys = sorted(
        {(arm.cell, arm.arm) for arm in results.arms},
        key=lambda key: (known.get(key[0], len(known)), key[0], key[1] != "faulted"),
    )
    found = dict[tuple[str, str], dict[str, float]]()
    for key in keys:
        arms = [arm for arm in results.arms if (arm.cell, arm.arm) == key]
        spent: dict[str, float] = dict.fromkeys(in_order(_classes(results)), 0.0)
        for arm in arms:
            split = {"useful": arm.useful_s, "unexplained": arm.residual_s, **arm.badput}
            for name, seconds in split.items():
                spent[name.replace("_", " ")] += seconds / len(arms)
        found[key] = spent
    return found


def _classes(results: Results) -> dict[str, None]:
    """Of every arm; what is unexplained is last."""
    badput = [name.replace("_", " ") for arm in results.arms for name in arm.badput]
    return dict.fromkeys(["useful", *badput, "unexplained"])


def wall_clock(spent: Mapping[str, Mapping[str, float]]) -> Chart:
    """Stacked bars of ``wall_seconds``, by name."""
    lines = {
        label: {name: seconds for name, seconds in row.items() if seconds > 0}
        for label, row in spent.items()
    }
    return shares("Training that counts", lines)


def throughput(pair: Pair, index: int, limits: tuple[float, float]) -> Plot:
    """Samples per second of new steps over time, with the span from injection to recovery
    shaded.
    """
    faulted = pair.faulted.throughput()
    control = pair.control.throughput() if pair.control else None
    title = _throughput_finding(pair, faulted, control)
    with drawing():
        fig = figure(WIDTH, 230)
        ax = axes(fig)
        hints = [_shade(ax, pair, incident, limits[0]) for incident in pair.incidents]
        if control is not None:
            ax.plot(
                control["time_s"], control["rate"], color=GREY_MID, lw=2.8, drawstyle="steps-pre"
            )
        ax.plot(faulted["time_s"], faulted["rate"], color=INK, lw=1.1, drawstyle="steps-pre")
        ax.set(
            xlim=(0, limits[0]),
            ylim=(0, limits[1]),
            xlabel="seconds since the start",
            ylabel=f"{pair.faulted.rate_unit}, new steps",
        )
        svg = to_svg(
            fig,
            f"throughput{index}",
            title,
            "Line of throughput over time; the fault is shaded.",
            hints,
            _rate_bands(ax, pair, faulted, control),
        )
    return Plot(title=title, svg=svg)


def throughput_limits(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Common ends of the axes, so that the cells' plots can be compared: seconds, samples/s."""
    series = [s for pair in pairs for s in (pair.faulted, pair.control) if s is not None]
    rates = pd.concat([s.throughput()["rate"] for s in series])
    # Two commits within microseconds of each other would flatten everything else.
    top = float(rates.quantile(0.99)) * 1.25 if len(rates) else 1.0
    ends = [float(s.steps["time_s"].max()) for s in series] + [p.faulted.arm.wall_s for p in pairs]
    return max(ends) or 1.0, top or 1.0


def _shade(ax: Axes, pair: Pair, incident: Incident, end: float) -> str:
    """Shade in the fault's colour until detection (or heal), then in the recovery's until the first
    new step; what to say of the fault's mark.
    """
    start = incident.injected_s
    healed = max(
        pair.faulted.healed.get((incident.fault, number), start) for number in incident.occurrences
    )
    if incident.recovery_time is None:
        ax.axvspan(start, max(healed, start), color=FAULT_WASH, lw=0)
    else:
        noticed = min(start + (incident.detection_time or 0.0), end)
        ax.axvspan(start, noticed, color=FAULT_WASH, lw=0)
        ax.axvspan(noticed, min(start + incident.recovery_time, end), color=RECOVERY_WASH, lw=0)
    ax.axvline(start, color=FAULT, lw=1.6)
    _fault_mark(ax, start)
    return f"{incident.kind} at {number(start)} s; {_which(incident)}"


def _fault_mark(ax: Axes, at: float) -> None:
    """Above the lines; the gid of the n-th is ``faultn``, by which words are put to it."""
    ax.plot(
        [at],
        [0.985],
        "v",
        color=FAULT,
        ms=7,
        transform=ax.get_xaxis_transform(),
        clip_on=False,
        gid=f"fault{sum(1 for one in ax.lines if one.get_gid())}",
    )


def _throughput_finding(pair: Pair, faulted: pd.DataFrame, control: pd.DataFrame | None) -> str:
    if not pair.incidents:
        return "no fault struck"
    last = max(pair.incidents, key=lambda i: i.injected_s)
    if any(i.recovery_time == math.inf for i in pair.incidents):
        return "never commits a new step after the fault"
    stalled = sum(i.recovery_time or 0.0 for i in pair.incidents)
    stalled = stalled or _standstill(faulted["time_s"], min(i.injected_s for i in pair.incidents))
    text = (
        f"{number(stalled, 'lower')} s without a new step"
        if stalled
        else "continues through the fault"
    )
    after = faulted[faulted["time_s"] > last.injected_s + (last.recovery_time or 0.0)]["rate"]
    if control is None or after.empty or control.empty:
        return text
    return (
        f"{text}, then {percent(float(after.median() / control['rate'].median()))} of the control's"
        " rate"
    )


def _standstill(times_s: pd.Series, since_s: float) -> float:
    """The longest time between two new steps that ended after ``since_s``, if it stands out; else
    0. Seconds.
    """
    gaps = times_s.sort_values().diff().dropna()
    longest = (
        float(gaps[times_s > since_s].max()) if (times_s > since_s).any() and len(gaps) else 0.0
    )
    return longest if longest > STANDS_OUT * float(gaps.median() if len(gaps) else 0.0) else 0.0


def loss(pair: Pair, index: int) -> Plot | None:
    """Loss by step against the unfaulted arm, and their difference on its own scale below."""
    if pair.control is None:
        return None
    faulted, control = pair.faulted.losses(), pair.control.losses()
    difference = (faulted - control).dropna()
    title = _loss_finding(difference, printed=pair.faulted.observed)
    with drawing():
        fig = figure(WIDTH, 290)
        top, low = fig.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
        top.plot(control.index, control, color=GREY_MID, lw=5.0, solid_capstyle="butt")
        top.plot(faulted.index, faulted, color=INK, lw=1.1)
        low.axhline(0, color=GREY_MID, lw=1.0)
        low.plot(difference.index, difference, color=INK, lw=1.1)
        hints = []
        for incident in pair.incidents:
            if incident.step is not None:
                hints.append(f"{incident.kind} in step {incident.step}; {_which(incident)}")
                top.axvline(incident.step, color=FAULT, lw=1.6)
                low.axvline(incident.step, color=FAULT, lw=1.6)
                _fault_mark(top, incident.step)
        top.set(ylabel="loss, as printed" if pair.faulted.observed else "loss (nats)")
        low.set(ylabel="difference", xlabel="step")
        low.locator_params(axis="y", nbins=3)
        low.ticklabel_format(axis="y", scilimits=(-2, 3))
        if not difference.any():
            low.set(ylim=(-1, 1), yticks=[0])
        for ax in (top, low):
            ax.grid(False, axis="x")
        fig.align_ylabels([top, low])
        svg = to_svg(
            fig,
            f"loss{index}",
            title,
            "Loss by step of the faulted and the unfaulted arm, and their difference.",
            hints,
            [band for ax in (top, low) for band in _loss_bands(ax, faulted, control)],
        )
    return Plot(title=title, svg=svg)


def _loss_finding(difference: pd.Series, *, printed: bool) -> str:
    if difference.empty:
        return "no step in common with the unfaulted arm"
    apart = difference[difference != 0]
    if apart.empty:
        same = f"same loss at every one of {len(difference)} steps"
        return f"{same}, as printed" if printed else f"{same}, bit for bit"
    worst = number(float(apart.abs().max()), "lower")
    return f"differs from step {apart.index[0]} on, by at most {worst}{'' if printed else ' nats'}"


def _rate_bands(
    ax: Axes, pair: Pair, faulted: pd.DataFrame, control: pd.DataFrame | None
) -> Iterator[Band]:
    """The median rate of each stretch, and that of the unfaulted arm in the same time."""
    unit, moments = pair.faulted.rate_unit, faulted["time_s"]
    # the first rate is of the time since a point that is not drawn
    usual = float(moments.diff().median()) if len(moments) > 1 else 0.0
    before = max(0.0, float(moments.iloc[0]) - usual) if len(moments) else 0.0
    for part in _parts(faulted):
        end = float(part["time_s"].iloc[-1])
        stretch = " to ".join(enclosing(before, end))
        words = f"{stretch} s: {number(float(part['rate'].median()))} {unit}"
        if control is not None:
            same = control[(control["time_s"] > before) & (control["time_s"] <= end)]["rate"]
            if len(same):
                words += f"; {number(float(same.median()))} without the fault"
        yield Band(ax=ax, low=before, high=end, words=words)
        before = end


def _loss_bands(ax: Axes, faulted: pd.Series, control: pd.Series) -> Iterator[Band]:
    """The last loss of each stretch, with that of the unfaulted arm and the difference."""
    before: float | None = None
    for part in _parts(faulted.dropna().to_frame("loss")):
        first, step = part.index[0], part.index[-1]
        value = float(part["loss"].iloc[-1])
        words = f"step {step}: loss {number(value)}"
        other = control.get(step)
        if other is not None and pd.notna(other):
            apart = value - float(other)
            words += f"; {number(float(other))} without the fault, difference {number(apart)}"
        low = first - 0.5 if before is None else before
        yield Band(ax=ax, low=low, high=step + 0.5, words=words)
        before = step + 0.5


def _parts(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Stretches of about the same number of points."""
    size = max(1, -(-len(frame) // MAX_BANDS))
    for start in range(0, len(frame), size):
        yield frame.iloc[start : start + size]
