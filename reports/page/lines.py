"""Lines over a horizontal axis, drawn by matplotlib: one or several panels above each other, as SVG
in CSS variables, so that one drawing serves light, dark and print.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from trainchaos.reports.page.charts import AxisScale, hinted, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, GAP, BELOW = 420.0, 24.0, 56.0
"""Width of a drawing, and the room between its panels, and above and below them, in pixels at its
natural size.
"""
MARK = 8.0
"""Pixels on either side of what happened once, in which its words are shown."""
VARIABLES = {
    "muted": "muted",
    "rule": "rule",
    "control": "grey-mid",
    "faulted": "ink",
    "fault": "fault",
    "unnoticed": "fault-wash",
    "recovering": "recovery-wash",
    "s0": "recovery",
    "s1": "fault",
    "s2": "ink",
    "s3": "grey-dark",
}
"""The CSS variable of each kind of line and area."""
COLOURS = {kind: f"#0102{number:02x}" for number, kind in enumerate(VARIABLES, start=3)}
"""matplotlib needs a real colour to draw with; these near-blacks become the variables."""
DASHES: dict[str, Any] = {"s1": (0, (5, 2)), "s2": (0, (1.5, 1.5)), "s3": (0, (5, 1.5, 1.5, 1.5))}
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trainchaos",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.parse_math": False,
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["muted"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titlecolor": COLOURS["muted"],
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "ytick.major.size": 0,
    "grid.color": COLOURS["rule"],
    "grid.linewidth": 0.7,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """``kind``: one of VARIABLES; ``stairs``: it holds its value since the point before."""

    kind: str
    points: Sequence[tuple[float, float]]
    stairs: bool = False


@dataclass(frozen=True, kw_only=True)
class Span:
    """From ``low`` to ``high`` on the horizontal axis. ``kind``: one of VARIABLES, empty: it is not
    seen, and only says its words when it is pointed at.
    """

    low: float
    high: float
    kind: str = ""
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines that share a vertical axis. ``marks``: (place, words) of what happened once; ``bars``:
    intervals, each a line from one end to the other.
    """

    name: str
    scale: AxisScale
    lines: Sequence[Line]
    high: float = 150.0
    spans: Sequence[Span] = ()
    marks: Sequence[tuple[float, str]] = ()
    bars: Sequence[Line] = ()
    ticks: Sequence[tuple[float, str]] | None = None


def plot(
    words: str,
    panels: Sequence[Panel],
    across: AxisScale,
    name: str,
    ticks: Sequence[tuple[float, str]] | None = None,
    *,
    of: str = "",
) -> Markup:
    """``words`` stand for the drawing; ``across``: the axis that the panels share, ``name``: below
    it; ``ticks``: (place, text), where not those of the scale; ``of``: what is drawn, where a page
    may have the same drawing twice.
    """
    import matplotlib
    from matplotlib.figure import Figure

    heights = [panel.high for panel in panels]
    high = sum(heights) + GAP * len(panels) + BELOW
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        figure = Figure(figsize=(WIDE / 72, high / 72), layout="constrained")
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        pairs = [(row[0], panel) for row, panel in zip(rows, panels, strict=True)]
        for ax, panel in pairs:
            _draw(ax, panel)
        _scale(ax.xaxis, across, ticks)
        ax.set_xlabel(name)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        hints = [_hint(ax, high, *band) for ax, panel in pairs for band in _bands(panel)]
    drawn = buffer.getvalue()
    drawn = drawn[drawn.index(">", drawn.index("<svg")) + 1 : drawn.rindex("</svg>")]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    for kind, colour in COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{VARIABLES[kind]})")
    return Markup(
        '<svg class="plot" viewBox="0 0 {1} {2}" role="img" aria-label="{0}"><title>{0}</title>{3}'
        "{4}</svg>"
    ).format(words, short(WIDE), short(high), _apart(drawn, of), Markup("").join(hints))


def _apart(drawn: str, of: str) -> Markup:
    """Its ids apart from those of other drawings on a page."""
    own = f"p{zlib.crc32((of + drawn).encode())}-"
    drawn = re.sub(r'\bid="', f'id="{own}', drawn)
    return Markup(re.sub(r'(?:xlink:)?(url\(|href=")#', rf"\1#{own}", drawn))


def _draw(ax: Axes, panel: Panel) -> None:
    ax.set_title(panel.name)
    _scale(ax.yaxis, panel.scale, panel.ticks)
    ax.grid(True, axis="y")
    for span in panel.spans:
        if span.kind:
            ax.axvspan(span.low, span.high, color=COLOURS[span.kind], linewidth=0)
    for line in panel.lines:
        ax.plot(
            *_along(line),
            color=COLOURS[line.kind],
            linewidth=3.5 if line.kind == "control" else 1.3,
            linestyle=DASHES.get(line.kind, "-"),
            drawstyle="steps-pre" if line.stairs else "default",
        )
    for bar in panel.bars:
        ax.plot(*_along(bar), color=COLOURS[bar.kind], linewidth=6, alpha=0.3)
    for at, _ in panel.marks:
        ax.axvline(at, color=COLOURS["fault"], linewidth=1.6)
        above = ax.get_xaxis_transform()
        ax.plot([at], [1.03], "v", color=COLOURS["fault"], transform=above, clip_on=False)


def _along(line: Line) -> tuple[list[float], list[float]]:
    return [at for at, _ in line.points], [value for _, value in line.points]


def _scale(axis: Any, scale: AxisScale, ticks: Sequence[tuple[float, str]] | None) -> None:
    """As charts have it, so that what stands side by side is comparable."""
    ends: list[float] = [scale.low, scale.high]
    if scale.logarithmic:
        (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
        ends = [10.0**end for end in ends]
    (axis.axes.set_xlim if axis.axis_name == "x" else axis.axes.set_ylim)(*ends)
    places = ticks or [(tick, f"{tick:g}") for tick in scale.ticks()]
    axis.set_ticks([at for at, _ in places], [text for _, text in places])
    axis.set_ticks([], minor=True)


def _bands(panel: Panel) -> Iterator[tuple[float, float, float, str]]:
    """From, to, pixels added on either side, words: those of marks are above the others."""
    yield from ((one.low, one.high, 0.0, one.words) for one in panel.spans if one.words)
    yield from ((at, at, MARK, words) for at, words in panel.marks if words)


def _hint(ax: Axes, high: float, low: float, end: float, more: float, words: str) -> Markup:
    """A rectangle that is not seen, and says its words when it is pointed at."""
    unit, box = 72 / ax.figure.dpi, ax.bbox
    ends = [ax.transData.transform((x, 1.0))[0] for x in (low, end)]
    left, right = (float(min(max(place, box.x0), box.x1)) * unit for place in ends)
    sides = left - more, high - box.y1 * unit, right - left + 2 * more, box.height * unit
    shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}">{}</rect>')
    return shape.format("mark" if more else "band", *map(short, sides), hinted(words))
