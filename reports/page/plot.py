"""A plot of the report, and its legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trainchaos.reports.page.svg import GREY_MID, PAPER

WIDE, HALF = 560.0, 400.0  # points
OTHER_LOOK = (GREY_MID, "----")


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One drawing: an ``<svg>`` element, the finding it shows and a note on how to read it."""

    title: str
    svg: str
    note: str = ""


def legend(fig: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    """Draw the legend below a figure: (label, colour, hatch) of each entry, read row by row."""
    columns = 6 if len(entries) <= 6 else 4
    # matplotlib fills column by column; people read row by row.
    by_row = [entry for column in range(columns) for entry in entries[column::columns]]
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=PAPER, label=name)
        for name, colour, hatch in by_row
    ]
    fig.legend(
        handles=handles,
        loc="outside lower left",
        ncols=columns,
        columnspacing=1.1,
        handlelength=1.4,
        handletextpad=0.5,
        borderpad=0.2,
        alignment="left",
    )
