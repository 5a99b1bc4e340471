"""The plots of the report. Each states its finding as its title and as its text alternative."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from trainchaos.harness.judge.incident import PHASE_NAMES, Incident
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content.facts import incidents_of, median_incident
from trainchaos.reports.content.figures import number, percent, plural
from trainchaos.reports.content.series import Pair
from trainchaos.reports.page import bands
from trainchaos.reports.page.plot import HALF, OTHER_LOOK, WIDE, Plot, legend
from trainchaos.reports.page.svg import (
    FAULT,
    FAULT_WASH,
    GREY_MID,
    INK,
    PAPER,
    RECOVERY,
    RECOVERY_SOFT,
    RECOVERY_WASH,
    axes,
    drawing,
    figure,
    to_svg,
)

# Hatches carry the meaning where colour cannot; the fault's colour marks the time before it was
# detected.
PHASE_LOOKS = {
    "detect": (FAULT, ""),
    "abort": (RECOVERY, "||||"),
    "regroup": (RECOVERY, "////"),
    "restore": (RECOVERY, ""),
    "redo": (RECOVERY_SOFT, "\\\\\\\\"),
    "first step": (RECOVERY_SOFT, ""),
}
MAX_HINTS = 300  # drawing a point of its own takes a millisecond
STANDS_OUT = 5.0  # times the usual gap between two steps


def waterfall(results: Results, cells: Sequence[str], labels: Sequence[str]) -> Plot | None:
    """Recovery by phase: the median incident of each cell, and every incident's total as a
    point.
    """
    rows = [
        (cell, label, found)
        for cell, label in zip(cells, labels, strict=True)
        if (found := _timed(results, cell))
    ]
    if not rows:
        return None
    title = _waterfall_finding(rows)
    with drawing():
        fig = figure(WIDE, 74 + 62 * len(rows))
        ax = axes(fig, grid="x")
        ends = [_end(i) for _, _, found in rows for i in found]
        span = max([e for e in ends if e > 0], default=1.0) * 1.06
        hints: dict[str, str] = {}
        for y, (cell, label, found) in enumerate(rows):
            typical = median_incident(results, cell)
            if typical is not None:
                hints |= _phase_bar(ax, y, typical)
            hints |= _recovery_points(ax, y, found, span, MAX_HINTS - len(hints))
            ax.text(0, y - 0.36, label, va="bottom", ha="left", color=INK)
        ax.set(
            xlim=(0, span),
            ylim=(len(rows) - 0.5, -0.62),
            yticks=[],
            xlabel="seconds since the fault was injected",
        )
        ax.spines["left"].set_visible(False)
        used = [
            p
            for p in PHASE_NAMES
            if any(s.name == p for _, _, found in rows for i in found for s in i.phases)
        ]
        legend(fig, [(p, *PHASE_LOOKS[p]) for p in used])
        svg = to_svg(
            fig,
            "waterfall",
            title,
            f"Stacked bars of {', '.join(used)} for {', '.join(r[1] for r in rows)}.",
            hints,
        )
    note = "Bar: the incident of median recovery time. Circles: every incident's recovery time."
    return Plot(title=title, svg=svg, note=note)


def _timed(results: Results, cell: str) -> list[Incident]:
    return [i for i in incidents_of(results, cell) if i.recovery_time is not None]


def _end(incident: Incident) -> float:
    """End of an incident's drawing: its recovery, or its last known phase if it never recovered."""
    last = max((p.start + p.seconds for p in incident.phases), default=0.0)
    recovery = incident.recovery_time or 0.0
    return last if math.isinf(recovery) else max(last, recovery)


def _phase_bar(ax: Axes, y: int, incident: Incident) -> dict[str, str]:
    """Draw the phases of an incident; what to say of each, by gid."""
    hints = {}
    for at, phase in enumerate(incident.phases):
        colour, hatch = PHASE_LOOKS.get(phase.name, OTHER_LOOK)
        gid = f"phase{y}-{at}"
        hints[gid] = f"{phase.name}: {number(phase.seconds)} s; {_which(incident)}"
        (bar,) = ax.barh(
            y,
            phase.seconds,
            left=phase.start,
            height=0.42,
            color=colour,
            hatch=hatch,
            edgecolor=PAPER,
            linewidth=0.6,
        )
        bar.set_gid(gid)
    return hints


def _which(incident: Incident) -> str:
    return f"faulted arm of {incident.cell}, repeat {incident.repeat}, fault {incident.fault}"


def _recovery_points(
    ax: Axes, y: int, incidents: Sequence[Incident], span: float, most: int
) -> dict[str, str]:
    """Draw the recovery time of each incident; what to say of each, by gid. Only ``most`` are
    artists of their own, with words.
    """
    times = [i.recovery_time for i in incidents if i.recovery_time is not None]
    known = [i for i in incidents if i.recovery_time is not None and math.isfinite(i.recovery_time)]
    finite = [t for t in times if math.isfinite(t)]
    look: dict[str, Any] = {"ms": 5, "mfc": "none", "mec": INK, "mew": 1.1, "ls": "none"}
    told = max(0, min(most, len(finite)))
    hints = {}
    for at, (incident, seconds) in enumerate(zip(known[:told], finite[:told], strict=True)):
        gid = f"recovery{y}-{at}"
        said = number(seconds, "lower")
        hints[gid] = f"recovery time {said} s; {_which(incident)}"
        ax.plot([seconds], [y + 0.34], "o", gid=gid, **look)
    ax.plot(finite[told:], [y + 0.34] * len(finite[told:]), "o", **look)
    never = len(times) - len(finite)
    if never:
        ax.plot([span * 0.985], [y + 0.34], ">", ms=6, color=INK, clip_on=False)
        ax.text(
            span * 0.965,
            y + 0.35,
            f"{never} of {len(times)} never",
            ha="right",
            va="center",
            color=INK,
        )
    return hints


def _waterfall_finding(rows: Sequence[tuple[str, str, list[Incident]]]) -> str:
    medians = {
        label: statistics.median(i.recovery_time or 0.0 for i in found) for _, label, found in rows
    }
    best, worst = min(medians, key=lambda k: medians[k]), max(medians, key=lambda k: medians[k])
    if math.isinf(medians[best]):
        return "No strategy recovered"
    parts = [f"{best} recovers in {number(medians[best], 'lower')} s"]
    if math.isinf(medians[worst]):
        parts.append(f"{worst} does not recover")
    elif worst != best and medians[best] > 0:
        parts.append(f"{worst} takes {number(medians[worst] / medians[best])} times as long")
    never = sum(math.isinf(i.recovery_time or 0.0) for _, _, found in rows for i in found)
    if never and math.isfinite(medians[worst]):
        parts.append(f"{plural(never, 'incident')} never recovered")
    return "; ".join(parts)


def throughput(pair: Pair, index: int, limits: tuple[float, float]) -> Plot:
    """Samples per second of new steps over time, with the span from injection to recovery
    shaded.
    """
    faulted = pair.faulted.throughput()
    control = pair.control.throughput() if pair.control else None
    title = _throughput_finding(pair, faulted, control)
    with drawing():
        fig = figure(HALF, 230)
        ax = axes(fig)
        hints: dict[str, str] = {}
        for incident in pair.incidents:
            hints |= _shade(ax, pair, incident, limits[0], len(hints))
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
            bands.of_throughput(ax, pair, faulted, control),
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


def _shade(ax: Axes, pair: Pair, incident: Incident, end: float, at: int) -> dict[str, str]:
    """Shade in the fault's colour until detection (or heal), then in the recovery's until the first
    new step; what to say of the fault's mark, by gid.
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
    gid = f"fault{at}"
    (point,) = ax.plot(
        [start], [0.985], "v", color=FAULT, ms=7, transform=ax.get_xaxis_transform(), clip_on=False
    )
    point.set_gid(gid)
    return {gid: f"{incident.kind} at {number(start)} s; {_which(incident)}"}


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
        fig = figure(HALF, 290)
        top, low = fig.subplots(2, 1, sharex=True, height_ratios=(3, 1.2))
        top.plot(control.index, control, color=GREY_MID, lw=5.0, solid_capstyle="butt")
        top.plot(faulted.index, faulted, color=INK, lw=1.1)
        low.axhline(0, color=GREY_MID, lw=1.0)
        low.plot(difference.index, difference, color=INK, lw=1.1)
        hints: dict[str, str] = {}
        for incident in pair.incidents:
            if incident.step is not None:
                gid = f"fault{len(hints)}"
                hints[gid] = f"{incident.kind} in step {incident.step}; {_which(incident)}"
                top.axvline(incident.step, color=FAULT, lw=1.6)
                low.axvline(incident.step, color=FAULT, lw=1.6)
                top.plot(
                    [incident.step],
                    [0.99],
                    "v",
                    color=FAULT,
                    ms=7,
                    transform=top.get_xaxis_transform(),
                    clip_on=False,
                    gid=gid,
                )
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
            [band for ax in (top, low) for band in bands.of_loss(ax, faulted, control)],
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
