"""matplotlib figures as inline SVG in CSS variables, so one drawing serves light, dark and
print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# matplotlib needs a real colour to draw with; these near-blacks are replaced by variables
# afterwards.
INK, MUTED, RULE, PAPER = "#010203", "#020304", "#030405", "#040506"
FAULT, FAULT_WASH, RECOVERY, RECOVERY_SOFT, RECOVERY_WASH = (
    "#050607",
    "#060708",
    "#070809",
    "#08090a",
    "#090a0b",
)
GREY_DARK, GREY_MID, GREY_LIGHT = "#0a0b0c", "#0b0c0d", "#0c0d0e"
_VARIABLES = (
    (INK, "ink"),
    (MUTED, "muted"),
    (RULE, "rule"),
    (PAPER, "paper"),
    (FAULT, "fault"),
    (FAULT_WASH, "fault-wash"),
    (RECOVERY, "recovery"),
    (RECOVERY_SOFT, "recovery-soft"),
    (RECOVERY_WASH, "recovery-wash"),
    (GREY_DARK, "grey-dark"),
    (GREY_MID, "grey-mid"),
    (GREY_LIGHT, "grey-light"),
)
BAND_HEIGHT = 0.94
"""Share of the height of axes that a band covers; the marks of faults are above it."""
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "trainchaos",
    "font.size": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10.5,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "hatch.linewidth": 1.1,
    "lines.linewidth": 1.3,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "axes.labelpad": 5,
    "savefig.facecolor": "none",
    "font.family": "sans-serif",
    "text.parse_math": False,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Draw and save within this: the styles of every plot, without touching the process's
    defaults.
    """
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]
        yield


def figure(width: float, height: float) -> Figure:
    """An empty figure; one unit is one CSS pixel at natural size."""
    return Figure(figsize=(width / 72, height / 72), layout="constrained")


def axes(fig: Figure, *, grid: str = "y") -> Axes:
    """The one pair of axes of a figure, with grid lines across ``grid`` only."""
    ax = fig.subplots()
    ax.grid(False)
    ax.grid(True, axis="x" if grid == "x" else "y")
    return ax


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of a plot from ``low`` to ``high`` on its horizontal axis; ``words`` are shown when
    it is pointed at.
    """

    ax: Axes
    low: float
    high: float
    words: str


def to_svg(
    fig: Figure,
    name: str,
    title: str,
    description: str,
    hints: Sequence[str] = (),
    bands: Iterable[Band] = (),
) -> str:
    """A well-formed ``<svg>`` element; ``name`` keeps its ids apart from those of other plots on
    the page. ``hints``: what is shown when the artist with the gid ``faultn`` is pointed at.
    """
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    fig.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    for sentinel, variable in _VARIABLES:
        # A presentation attribute cannot hold var(); a style can.
        text = re.sub(rf'\b(fill|stroke)="{sentinel}"', rf'style="\1: var(--{variable})"', text)
        text = text.replace(sentinel, f"var(--{variable})")
    for place, words in enumerate(hints):
        opened = f'<g id="{name}-fault{place}">'
        text = text.replace(opened, f"{opened}<title>{escape(words)}</title>", 1)
    over = "".join(_band(fig, band) for band in bands)
    text = text[: text.rindex("</svg>")] + over + text[text.rindex("</svg>") :]
    return _labelled(text, name, title, description)


def _band(fig: Figure, band: Band) -> str:
    """Drawn over the lines, and below the marks of faults, which have words of their own."""
    unit, height = 72 / fig.dpi, fig.get_figheight() * 72  # SVG has 72 units an inch, from the top
    bottom = band.ax.transAxes.transform((0, 0))[1] * unit
    top = band.ax.transAxes.transform((0, BAND_HEIGHT))[1] * unit
    ends = [band.ax.transData.transform((x, 0))[0] for x in (band.low, band.high)]
    left, right = (float(min(max(end, band.ax.bbox.x0), band.ax.bbox.x1)) * unit for end in ends)
    return (
        f'<rect x="{left:.1f}" y="{height - top:.1f}" width="{right - left:.1f}"'
        f' height="{top - bottom:.1f}" fill="none" pointer-events="all">'
        f"<title>{escape(band.words)}</title></rect>"
    )


def _labelled(text: str, name: str, title: str, description: str) -> str:
    """Give the root element its accessible name, and let the page decide its size."""
    end = text.index(">")
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", text[:end])
    box = re.search(r'viewBox="0 0 ([0-9.]+)', head)
    width = float(box[1]) if box else 600.0
    head += (
        f' role="img" aria-labelledby="{name}-title {name}-desc" style="max-width:'
        f' {width * 1.15:.0f}px"'
    )
    names = (
        f'<title id="{name}-title">{escape(title)}</title><desc'
        f' id="{name}-desc">{escape(description)}</desc>'
    )
    return head + ">" + names + text[end + 1 :]
