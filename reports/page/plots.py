"""The plots of a run: recovery and wall time as charts, throughput and loss as lines. Each states
its finding as its title and as its text alternative.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from trainchaos.chaos.stats import percentile
from trainchaos.chaos.units import enclosing, number, percent, plural, with_unit
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import Results
from trainchaos.reports.content.facts import incidents_of, median_incident
from trainchaos.reports.content.figures import median_of
from trainchaos.reports.content.series import Pair
from trainchaos.reports.page.charts import (
    AxisScale,
    Chart,
    Course,
    Point,
    Times,
    courses,
    in_order,
    shares,
    times,
)
from trainchaos.reports.page.lines import Line, Panel, Span, plot

MAX_BANDS = 40
STANDS_OUT = 5.0  # times the usual gap between two steps
Series = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One drawing: an ``<svg>`` element, and the finding it shows."""

    title: str
    svg: Markup


def recoveries(results: Results, labels: Mapping[str, str]) -> tuple[Chart | None, Chart | None]:
    """Of the cells with ``labels`` every recovery time, and the median incident phase by phase."""
    timed = {
        cell: [i for i in incidents_of(results, cell) if i.recovery_time is not None]
        for cell in labels
    }
    timed = {cell: incidents for cell, incidents in timed.items() if incidents}
    if not timed:
        return None, None
    metrics = {cell.id: cell.metrics.get("recovery_time") for cell in results.cells}
    points, phases = [], []
    for cell, incidents in timed.items():
        metric, typical = metrics[cell], median_incident(results, cell)
        points.append(
            Times(
                name=labels[cell],
                points=[_point(incident) for incident in incidents],
                median=metric.median if metric else None,
                bounds=metric.ci95 if metric else None,
                value=median_of(metric, unit=True),
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
    title = _recovery_finding({labels[cell]: incidents for cell, incidents in timed.items()})
    course = courses("The incident of median recovery time, phase by phase", phases)
    return times(title, points, logarithmic=False), course if phases else None


def _point(incident: Incident) -> Point:
    seconds = incident.recovery_time or 0.0
    said = f"recovery time {with_unit(seconds, 's', 'lower')}; {_which(incident)}"
    return Point(value=seconds, words=said)


def _which(incident: Incident) -> str:
    return f"faulted arm of {incident.cell}, repeat {incident.repeat}, fault {incident.fault}"


def _recovery_finding(timed: Mapping[str, Sequence[Incident]]) -> str:
    values = {label: [i.recovery_time or 0.0 for i in mine] for label, mine in timed.items()}
    medians = {label: statistics.median(mine) for label, mine in values.items()}
    best, worst = min(medians, key=lambda k: medians[k]), max(medians, key=lambda k: medians[k])
    if math.isinf(medians[best]):
        return "No strategy recovered"
    parts = [f"{best} recovers in {number(medians[best], 'lower')} s"]
    if math.isinf(medians[worst]):
        parts.append(f"{worst} does not recover")
    elif worst != best and medians[best] > 0:
        parts.append(f"{worst} takes {number(medians[worst] / medians[best])} times as long")
    never = sum(math.isinf(value) for mine in values.values() for value in mine)
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
    badput = [name.replace("_", " ") for arm in results.arms for name in arm.badput]
    names = in_order(dict.fromkeys(["useful", *badput, "unexplained"]))
    spent: dict[tuple[str, str], dict[str, float]] = {}
    for key in keys:
        arms = [arm for arm in results.arms if (arm.cell, arm.arm) == key]
        spent[key] = dict.fromkeys(names, 0.0)
        for arm in arms:
            split = {"useful": arm.useful_s, "unexplained": arm.residual_s, **arm.badput}
            for name, seconds in split.items():
                spent[key][name.replace("_", " ")] += seconds / len(arms)
    return spent


def wall_clock(spent: Mapping[str, Mapping[str, float]]) -> Chart:
    """Stacked bars of ``wall_seconds``, by name."""
    rows = {
        label: {name: seconds for name, seconds in row.items() if seconds > 0}
        for label, row in spent.items()
    }
    return shares("Training that counts", rows)


def throughput(pair: Pair, limits: tuple[float, float]) -> Plot:
    """Samples per second of new steps over time, with the span from injection to recovery
    shaded: in the fault's colour until detection (or heal), then in the recovery's.
    """
    faulted = pair.faulted.throughput()
    control = pair.control.throughput() if pair.control else None
    spans = list(_rate_bands(pair, faulted, control))
    for incident in pair.incidents:
        start = incident.injected_s
        healed = [pair.faulted.healed.get((incident.fault, n), start) for n in incident.occurrences]
        noticed, again = max([start, *healed]), start
        if incident.recovery_time is not None:
            noticed = min(start + (incident.detection_time or 0.0), limits[0])
            again = min(start + incident.recovery_time, limits[0])
        spans.append(Span(low=start, high=noticed, kind="unnoticed"))
        spans.append(Span(low=noticed, high=max(noticed, again), kind="recovering"))
    panel = Panel(
        name=f"{pair.faulted.rate_unit}, new steps",
        scale=AxisScale([limits[1]], room=98.0),
        lines=[
            *([Line(kind="control", points=control, stairs=True)] if control else []),
            Line(kind="faulted", points=faulted, stairs=True),
        ],
        spans=spans,
        marks=[
            (one.injected_s, f"{one.kind} at {number(one.injected_s)} s; {_which(one)}")
            for one in pair.incidents
        ],
    )
    title = _throughput_finding(pair, faulted, control)
    across = AxisScale([limits[0]], room=98.0)
    return Plot(
        title=title, svg=plot(title, [panel], across, "seconds since the start", of=pair.cell)
    )


def throughput_limits(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Common ends of the axes, so that the cells' plots can be compared: seconds, samples/s."""
    series = [s for pair in pairs for s in (pair.faulted, pair.control) if s is not None]
    rates = [rate for one in series for _, rate in one.throughput()]
    # two commits within microseconds of each other would flatten everything else
    top = percentile(rates, 0.99) * 1.25 if rates else 1.0
    ends = [float(one.steps["time_s"].iloc[-1]) for one in series] + [
        p.faulted.arm.wall_s for p in pairs
    ]
    return max(ends) or 1.0, top or 1.0


def _throughput_finding(pair: Pair, faulted: Series, control: Series | None) -> str:
    if not pair.incidents:
        return "no fault struck"
    last = max(pair.incidents, key=lambda i: i.injected_s)
    if any(i.recovery_time == math.inf for i in pair.incidents):
        return "never commits a new step after the fault"
    stalled = sum(i.recovery_time or 0.0 for i in pair.incidents)
    stalled = stalled or _standstill(faulted, min(i.injected_s for i in pair.incidents))
    text = "continues through the fault"
    if stalled:
        text = f"{number(stalled, 'lower')} s without a new step"
    over = last.injected_s + (last.recovery_time or 0.0)
    after = [rate for time_s, rate in faulted if time_s > over]
    if not control or not after:
        return text
    share = statistics.median(after) / statistics.median(rate for _, rate in control)
    return f"{text}, then {percent(share)} of the control's rate"


def _standstill(faulted: Series, since_s: float) -> float:
    """The longest time between two new steps that ended after ``since_s``, if it stands out; else
    0. Seconds.
    """
    gaps = [(b[0] - a[0], b[0]) for a, b in pairwise(faulted)]
    longest = max((gap for gap, end in gaps if end > since_s), default=0.0)
    usual = statistics.median(gap for gap, _ in gaps) if gaps else 0.0
    return longest if longest > STANDS_OUT * usual else 0.0


def loss(pair: Pair) -> Plot | None:
    """Loss by step against the unfaulted arm, and their difference on its own scale below."""
    if pair.control is None:
        return None
    faulted, control = pair.faulted.losses(), pair.control.losses()
    apart = {step: value - control[step] for step, value in faulted.items() if step in control}
    apart = {step: value for step, value in apart.items() if not math.isnan(value)}
    title = _loss_finding(apart, printed=pair.faulted.observed)
    hit = [one for one in pair.incidents if one.step is not None]
    marks = [(float(i.step or 0), f"{i.kind} in step {i.step}; {_which(i)}") for i in hit]
    bands = list(_loss_bands(faulted, control))
    curves = {"control": _points(control), "faulted": _points(faulted)}
    values = [value for curve in curves.values() for _, value in curve]
    differences = [value for value in apart.values() if math.isfinite(value)]
    panels = [
        Panel(
            name="loss, as printed" if pair.faulted.observed else "loss (nats)",
            scale=AxisScale(values, room=98.0, zero=False),
            lines=[Line(kind=kind, points=points) for kind, points in curves.items()],
            spans=bands,
            marks=marks,
        ),
        Panel(
            name="difference",
            scale=AxisScale(differences, room=98.0),
            lines=[Line(kind="faulted", points=_points(apart))],
            high=60.0,
            spans=bands,
            marks=[(at, "") for at, _ in marks],
            ticks=None if any(differences) else [(0.0, "0")],
        ),
    ]
    steps = [float(step) for step in {*faulted, *control}]
    across = AxisScale(steps, room=98.0, zero=False)
    return Plot(title=title, svg=plot(title, panels, across, "step", of=pair.cell))


def _points(curve: Mapping[int, float]) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in curve.items() if math.isfinite(value)]


def _loss_finding(apart: Mapping[int, float], *, printed: bool) -> str:
    if not apart:
        return "no step in common with the unfaulted arm"
    differ = {step: abs(value) for step, value in apart.items() if value != 0}
    if not differ:
        same = f"same loss at every one of {len(apart)} steps"
        return f"{same}, as printed" if printed else f"{same}, bit for bit"
    worst = number(max(differ.values()), "lower")
    return f"differs from step {min(differ)} on, by at most {worst}{'' if printed else ' nats'}"


def _rate_bands(pair: Pair, faulted: Series, control: Series | None) -> Iterator[Span]:
    """The median rate of each stretch, and that of the unfaulted arm in the same time."""
    unit, moments = pair.faulted.rate_unit, [time_s for time_s, _ in faulted]
    # the first rate is of the time since a point that is not drawn
    gaps = [b - a for a, b in pairwise(moments)]
    before = max(0.0, moments[0] - (statistics.median(gaps) if gaps else 0.0)) if moments else 0.0
    for part in _parts(faulted):
        end, rate = part[-1][0], statistics.median(rate for _, rate in part)
        words = f"{' to '.join(enclosing(before, end))} s: {number(rate)} {unit}"
        same = [other for time_s, other in control or () if before < time_s <= end]
        if same:
            words += f"; {number(statistics.median(same))} without the fault"
        yield Span(low=before, high=end, words=words)
        before = end


def _loss_bands(faulted: Mapping[int, float], control: Mapping[int, float]) -> Iterator[Span]:
    """The last loss of each stretch, with that of the unfaulted arm and the difference."""
    before: float | None = None
    for part in _parts(list(faulted.items())):
        step, value = int(part[-1][0]), part[-1][1]
        words = f"step {step}: loss {number(value)}"
        if step in control:
            apart = number(value - control[step])
            words += f"; {number(control[step])} without the fault, difference {apart}"
        low = part[0][0] - 0.5 if before is None else before
        before = step + 0.5
        yield Span(low=low, high=before, words=words)


def _parts(items: Series) -> Iterator[Series]:
    """Stretches of about the same number of points."""
    size = max(1, -(-len(items) // MAX_BANDS))
    for start in range(0, len(items), size):
        yield items[start : start + size]
