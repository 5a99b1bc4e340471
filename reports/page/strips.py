"""Small drawings of the page: the points of an SLA clause against its limit, the moments of an arm
over its time, and the recovery times of earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup

from trainchaos.chaos.units import MISSING, number, plural, quantity, with_unit
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import SlaResult
from trainchaos.reports.content.figures import clause_of
from trainchaos.reports.content.history import PastRun
from trainchaos.reports.content.timeline import CHECKPOINT, FAULT, OTHER, RECOVERY, Timeline
from trainchaos.reports.page.charts import (
    ARROW,
    CIRCLE,
    AxisScale,
    Point,
    box,
    drawing,
    line,
    mark,
    placed,
    short,
)

MAX_HINTS = 100
LEFT, RIGHT = 1.0, 99.0
FORBIDDEN: Mapping[str, int] = {"<": 1, "<=": 1, ">": -1, ">=": -1}
"""Which side of a limit a clause forbids: above or below."""
LANES: Mapping[str, tuple[float, str]] = {
    FAULT: (16, "M-5 -5h10l-5 10z"),
    RECOVERY: (36, "M0 -5l4 5l-4 5l-4 -5z"),
    CHECKPOINT: (56, "M-3 -3h6v6h-6z"),
    OTHER: (76, "M0 -5v10"),
}
"""Lane of a timeline -> its place, and a mark whose form tells it where colour cannot."""
LANES_LEFT, LANES_END = 12.0, 90.0
CROSS = "M-5 -5l10 10m0 -10l-10 10"


def of_clause(sla: SlaResult) -> Markup:
    """Every value as a point, the limit as a line, the forbidden side shaded; infinity is an arrow.
    Empty without values.
    """
    if not sla.values:
        return Markup("")
    clause = clause_of(sla)
    limit = clause.limit if clause else math.nan
    side = FORBIDDEN.get(clause.op, 0) if clause else 0
    scale = AxisScale([*sla.values, *([limit] if clause else [])], logarithmic=False)
    parts = [line("axis", LEFT, RIGHT, 13, 13)]
    if clause is not None:
        at = scale.at(limit)
        if side:
            ends = (at, RIGHT) if side > 0 else (LEFT, at)
            parts.append(box("forbidden", *ends, top=5, high=16))
        parts.append(line("limit", at, at, 2, 24))
    for index, value in enumerate(sla.values):
        point = Point(
            value=value,
            out=(value - limit) * side > 0 if side else math.isinf(value),
            # older results do not tell the repeat
            words=f"{sla.metric} {with_unit(value, sla.unit)}; {sla.cell}"
            + (f", repeat {sla.arms[index]}" if index < len(sla.arms) else ""),
        )
        parts.append(mark(scale, point, 13, hint=index < MAX_HINTS))
    count = plural(1, "value") if sla.counted == "1" else f"{sla.counted} values"
    against = f" against the limit {with_unit(limit, sla.unit)}" if clause else ""
    values = ", ".join(quantity(value, sla.unit) for value in sla.values)
    return drawing("strip", f"{count}{against}: {values}", parts, 26)


def of_arm(one: Timeline, summary: str) -> Markup:
    """Every moment on its lane, over the whole time of the arm; the span until recovery is
    shaded.
    """
    moments = [m.time_s for m in one.moments]
    end = max([one.arm.wall_s, *moments, 1e-9])
    first = min([0.0, *moments])

    def at(time_s: float) -> float:
        share = (min(time_s, end) - first) / ((end - first) or 1.0)
        return LANES_LEFT + share * (RIGHT - LANES_LEFT)

    parts = []
    for incident in one.incidents:
        for kind, low, high in _stretches(incident):
            if at(high) > at(low):
                parts.append(box(kind, at(low), at(high), 4, LANES_END - 4))
    for lane, (y, _) in LANES.items():
        parts.append(_text("lane", 0, y + 4, lane))
        parts.append(line("axis", LANES_LEFT, RIGHT, y, y))
    for moment in one.moments:
        said = (f"{moment.time_s:.3f} s: {moment.what}", moment.who, moment.detail)
        y, shape = LANES[moment.lane]
        words = ", ".join(part for part in said if part)
        parts.append(placed(at(moment.time_s), y, moment.lane, shape, words))
    for tick in (end * share / 4 for share in range(5)):
        x = at(tick)
        parts.append(line("axis", x, x, LANES_END - 4, LANES_END))
        anchor = "end" if x > 95 else "middle"
        parts.append(_text("tick", x, 104, f"{number(tick)} s", anchor))
    return drawing(
        "timeline", f"Events of {one.arm.id} over {number(end)} s: {summary}", parts, 108
    )


def _stretches(incident: Incident) -> list[tuple[str, float, float]]:
    """Not yet noticed, then until the first new step."""
    start, recovery = incident.injected_s, incident.recovery_time
    if recovery is None:
        return []
    noticed = start + (incident.detection_time or 0.0)
    return [("unnoticed", start, noticed), ("recovering", noticed, start + recovery)]


def of_runs(runs: Sequence[PastRun], cell: str, name: str) -> Markup:
    """Medians from the oldest run to this one, from zero up; one that never recovered is an arrow
    at the top. The points of failed runs are crossed, that of this run is filled.
    """
    known = [
        (place, run, metric, metric.median)
        for place, run in enumerate(runs)
        if (metric := run.recovery.get(cell)) is not None and metric.median is not None
    ]
    top = max([m for *_, m in known if math.isfinite(m)], default=0.0) * 1.15 or 1.0
    step = 92 / max(1, len(runs) - 1)
    places = [
        (4 + place * step, 10.0 if math.isinf(median) else 66 - median / top * 56)
        for place, _, _, median in known
    ]
    parts = [line("axis", 4, 96, 66, 66)]
    parts += [line("way", a[0], b[0], a[1], b[1]) for a, b in pairwise(places)]
    for (x, y), (_, run, metric, median) in zip(places, known, strict=True):
        kind = "point now" if run.present else "point"
        said = (
            f"{run.started}, {run.title}: median {with_unit(median, metric.unit)},"
            f" n = {metric.counted}"
        )
        parts.append(placed(x, y, kind, ARROW if math.isinf(median) else CIRCLE, said))
        if run.verdict == "fail":
            parts.append(placed(x, y, "cross", CROSS))
    parts.append(_text("tick", 4, 80, runs[0].started[:10], "start"))
    parts.append(_text("tick", 96, 80, f"this run: {_median(runs[-1].recovery.get(cell))}", "end"))
    label = (
        f"Median recovery time of {name} over {plural(len(known), 'run')}, up to {number(top)} s"
    )
    return drawing("past", label, parts, 84)


def _median(metric: Metric | None) -> str:
    return MISSING if metric is None else with_unit(metric.median, metric.unit, metric.better)


def _text(kind: str, at: float, y: float, text: str, anchor: str = "start") -> Markup:
    return Markup('<text class="{}" x="{}%" y="{}" text-anchor="{}">{}</text>').format(
        kind, short(at), short(y), anchor, text
    )
