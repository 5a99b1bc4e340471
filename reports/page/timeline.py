"""The timeline of an arm: a strip over its whole time, and a table of its moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.harness.judge.incident import Incident
from trainchaos.reports.content.figures import MISSING, number, plural, with_unit
from trainchaos.reports.content.timeline import (
    CHECKPOINT,
    FAULT,
    OTHER,
    RECOVERY,
    Moment,
    Timeline,
)
from trainchaos.reports.page.table import PageColumn, PageTable, mark, numeric, table

MANY = 4
"""With more arms than this, only those that did not end well are open."""
WIDTH, LEFT, RIGHT = 720.0, 84.0, 12.0
LANES = {FAULT: 16.0, RECOVERY: 36.0, CHECKPOINT: 56.0, OTHER: 76.0}
NAMES = {FAULT: "fault", RECOVERY: "recovery", CHECKPOINT: "checkpoint", OTHER: "other"}
AXIS, HEIGHT = 90.0, 108.0
FINEST_S = 1e-3


@dataclass(frozen=True, kw_only=True)
class ArmTimeline:
    """What the page shows of an arm. ``verdict``: the group of findings that it is shown with."""

    arm: str
    verdict: str
    outcome: Markup
    summary: str
    strip: Markup
    moments: PageTable
    open: bool


def shown(timelines: Sequence[Timeline]) -> list[ArmTimeline]:
    """Every timeline, ready for the page."""
    return [
        ArmTimeline(
            arm=one.arm.id,
            verdict=_verdict(one),
            outcome=mark(_verdict(one), one.arm.outcome),
            summary=_summary(one),
            strip=strip(one),
            moments=_table(one),
            open=not one.ended_well or len(timelines) <= MANY,
        )
        for one in timelines
    ]


def _verdict(one: Timeline) -> str:
    if one.ended_well:
        return "pass"
    verdicts = {finding.verdict for finding in one.arm.invariants.values()}
    return "fail" if "fail" in verdicts or one.arm.outcome != "completed" else "inconclusive"


def _summary(one: Timeline) -> str:
    failed = [name for name, finding in one.arm.invariants.items() if finding.verdict != "pass"]
    said = [plural(len(one.incidents), "incident")]
    times = [i.recovery_time for i in one.incidents if i.recovery_time is not None]
    if times:
        said.append("recovery " + ", ".join(with_unit(t, "s", "lower") for t in times[:4]))
    if failed:
        said.append(f"not held: {', '.join(failed[:4])}")
    return "; ".join(said)


def _table(one: Timeline) -> PageTable:
    columns = (
        numeric("time", "s"),
        numeric("since the fault", "s"),
        PageColumn(name="event"),
        PageColumn(name="who"),
        PageColumn(name="detail", kind="wide"),
    )
    rows: list[list[str]] = []
    struck: float | None = None
    for moment in one.moments:
        if moment.what.startswith("fault injected"):
            struck = moment.time_s
        since = MISSING if struck is None else f"+{moment.time_s - struck:.3f}"
        what = Markup('<span class="m {}"><i></i>{}</span>').format(moment.lane, moment.what)
        rows.append([f"{moment.time_s:.3f}", since, what, moment.who, moment.detail])
    notes = [f"{plural(one.left_out, 'event')} left out here; all are in trace.json."]
    return table(columns, rows, notes if one.left_out else ())


def strip(one: Timeline) -> Markup:
    """Every moment on its lane, over the whole time of the arm; the span until recovery is
    shaded.
    """
    times = [m.time_s for m in one.moments]
    end = max([one.arm.wall_s, *times, 1e-9])
    scale = _Scale(min([0.0, *times]), end)
    label = f"Events of {one.arm.id} over {number(end)} s: {_summary(one)}"
    parts = [part for incident in one.incidents for part in _shades(scale, incident, end)]
    for lane, y in LANES.items():
        parts.append(
            Markup(
                '<text class="lane" x="0" y="{}">{}</text>'
                '<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>'
            ).format(_n(y + 4), NAMES[lane], _n(LEFT), _n(WIDTH - RIGHT), _n(y), _n(y))
        )
    parts += [_point(scale, moment) for moment in one.moments]
    parts += [_tick(scale, end * share / 4) for share in range(5)]
    return Markup(
        '<svg class="timeline" viewBox="0 0 {} {}" role="img" aria-label="{}"><title>{}</title>{}'
        "</svg>"
    ).format(_n(WIDTH), _n(HEIGHT), label, label, Markup("").join(parts))


class _Scale:
    """Maps seconds to horizontal positions."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._span = low, (high - low) or 1.0

    def __call__(self, time_s: float) -> float:
        return LEFT + (time_s - self._low) / self._span * (WIDTH - LEFT - RIGHT)


def _shades(scale: _Scale, incident: Incident, end: float) -> list[Markup]:
    start = incident.injected_s
    if incident.recovery_time is None:
        return []
    noticed = min(start + (incident.detection_time or 0.0), end)
    done = end if math.isinf(incident.recovery_time) else min(start + incident.recovery_time, end)
    found = []
    for kind, low, high in (("unnoticed", start, noticed), ("recovering", noticed, done)):
        x, wide = scale(low), scale(high) - scale(low)
        if wide > 0:
            found.append(
                Markup('<rect class="{}" x="{}" y="4" width="{}" height="{}"/>').format(
                    kind, _n(x), _n(wide), _n(AXIS - 4)
                )
            )
    return found


def _point(scale: _Scale, moment: Moment) -> Markup:
    """A mark whose form tells the lane where colour cannot."""
    x, y = scale(moment.time_s), LANES[moment.lane]
    words = f"{moment.time_s:.3f} s: {moment.what}"
    said = ", ".join(part for part in (words, moment.who, moment.detail) if part)
    shapes = {
        FAULT: f"M{_n(x - 5)} {_n(y - 5)}h10l-5 10z",
        RECOVERY: f"M{_n(x)} {_n(y - 5)}l4 5l-4 5l-4 -5z",
        CHECKPOINT: f"M{_n(x - 3)} {_n(y - 3)}h6v6h-6z",
        OTHER: f"M{_n(x)} {_n(y - 5)}v10",
    }
    return Markup('<path class="{}" d="{}"><title>{}</title></path>').format(
        moment.lane, shapes[moment.lane], said
    )


def _tick(scale: _Scale, time_s: float) -> Markup:
    x = scale(time_s)
    anchor = "end" if x > WIDTH - RIGHT - 30 else "middle"
    return Markup(
        '<line class="axis" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>'
        '<text class="tick" x="{0}" y="{3}" text-anchor="{4}">{5}</text>'
    ).format(_n(x), _n(AXIS - 4), _n(AXIS), _n(HEIGHT - 4), anchor, f"{number(time_s)} s")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
