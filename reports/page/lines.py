"""Lines over a horizontal axis, one drawing of one or several panels above each other, as SVG that
is coloured by classes, so that one drawing serves light, dark and print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.reports.page.charts import AxisScale, hinted, short

WIDE, LEFT, TOP, GAP, BELOW = 420.0, 46.0, 16.0, 18.0, 34.0
"""Width of a drawing, and the room beside, above, between and below its panels, in its own units,
which are pixels at its natural size.
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """``kind``: its CSS class; ``stairs``: it holds its value since the point before."""

    kind: str
    points: Sequence[tuple[float, float]]
    stairs: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """From ``low`` to ``high`` on the horizontal axis. ``kind``: its CSS class, empty: it is not
    seen, and only says its words when it is pointed at.
    """

    low: float
    high: float
    kind: str = ""
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines that share a vertical axis. ``marks``: (place, words) of what happened once; ``areas``:
    filled polygons, as lines.
    """

    name: str
    scale: AxisScale
    lines: Sequence[Line]
    high: float = 150.0
    spans: Sequence[Span] = ()
    marks: Sequence[tuple[float, str]] = ()
    areas: Sequence[Line] = ()
    ticks: Sequence[tuple[float, str]] | None = None


def plot(
    words: str,
    panels: Sequence[Panel],
    across: AxisScale,
    name: str,
    ticks: Sequence[tuple[float, str]] | None = None,
) -> Markup:
    """``words`` stand for the drawing; ``across``: the axis that the panels share, ``name``: below
    it; ``ticks``: (place, text), where not those of the scale.
    """
    places = ticks or [(tick, f"{tick:g}") for tick in across.ticks()]
    parts, top = [], TOP
    for panel in panels:
        parts.append(_panel(panel, top, across))
        top += panel.high + GAP
    foot = top - GAP
    for at, text in places:
        parts.append(_text("tick", _x(across, at), foot + 14, text))
    parts.append(_text("axis-name", (LEFT + WIDE) / 2, foot + BELOW - 4, name))
    return Markup(
        '<svg class="plot" viewBox="0 0 {1} {2}" role="img" aria-label="{0}"><title>{0}</title>{3}'
        "</svg>"
    ).format(words, short(WIDE), short(foot + BELOW), Markup("").join(parts))


def _panel(panel: Panel, top: float, across: AxisScale) -> Markup:
    scale, foot = panel.scale, top + panel.high

    def y(value: float) -> float:
        return foot - (scale.at(value) - 1.0) / 98.0 * panel.high

    def path(line: Line) -> str:
        drawn, before = [], None
        for at, value in line.points:
            if line.stairs and before is not None:
                drawn.append(f"{short(before)},{short(y(value))}")
            before = _x(across, at)
            drawn.append(f"{short(before)},{short(y(value))}")
        return " ".join(drawn)

    def rect(span: Span) -> Markup:
        left, right = _x(across, span.low), _x(across, span.high)
        seen = span.kind or "band"
        return Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}">{}</rect>').format(
            seen, *map(short, (left, top, max(0.0, right - left), panel.high)), hinted(span.words)
        )

    parts = [rect(span) for span in panel.spans if span.kind]
    ticks = panel.ticks or [(tick, f"{tick:g}") for tick in scale.ticks()]
    for tick, text in ticks:
        parts.append(_line("grid", LEFT, WIDE, y(tick), y(tick)))
        parts.append(_text("tick left", LEFT - 6, y(tick) + 3.5, text))
    parts.append(_line("axis", LEFT, WIDE, foot, foot))
    shape = Markup('<{} class="{}" points="{}"/>')
    parts += [shape.format("polygon", area.kind, path(area)) for area in panel.areas]
    parts += [shape.format("polyline", line.kind, path(line)) for line in panel.lines]
    parts += [_line("fault", _x(across, at), _x(across, at), top, foot) for at, _ in panel.marks]
    parts += [rect(span) for span in panel.spans if not span.kind]
    for at, words in panel.marks:
        middle = _x(across, at)
        corners = f"{short(middle - 5)},{short(top - 8)} {short(middle + 5)},{short(top - 8)}"
        parts.append(
            Markup('<polygon class="fault" points="{} {},{}">{}</polygon>').format(
                corners, short(middle), short(top + 1), hinted(words)
            )
        )
    parts.append(_text("axis-name", LEFT, top - 5, panel.name, "start"))
    return Markup("").join(parts)


def _x(scale: AxisScale, value: float) -> float:
    return LEFT + (scale.at(value) - 1.0) / 98.0 * (WIDE - LEFT)


def _line(kind: str, left: float, right: float, top: float, bottom: float) -> Markup:
    ends = map(short, (left, right, top, bottom))
    return Markup('<line class="{}" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(kind, *ends)


def _text(kind: str, x: float, y: float, text: str, anchor: str = "") -> Markup:
    anchor = anchor or ("end" if "left" in kind else "middle")
    return Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
        kind, short(x), short(y), anchor, text
    )
