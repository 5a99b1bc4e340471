"""Plot of wall time by class."""

from __future__ import annotations

import pandas as pd

from trainchaos.reports.content.figures import percents
from trainchaos.reports.page.plot import OTHER_LOOK, WIDE, Plot, legend
from trainchaos.reports.page.svg import (
    FAULT,
    GREY_DARK,
    GREY_LIGHT,
    GREY_MID,
    INK,
    MUTED,
    PAPER,
    RECOVERY,
    RECOVERY_SOFT,
    axes,
    drawing,
    figure,
    to_svg,
)

CLASS_LOOKS = {
    "useful": (GREY_LIGHT, ""),
    "detection": (FAULT, ""),
    "regroup": (RECOVERY, "////"),
    "restore": (RECOVERY, ""),
    "recomputation": (RECOVERY_SOFT, "\\\\\\\\"),
    "degraded world": (RECOVERY_SOFT, ""),
    "initialisation": (GREY_DARK, ""),
    "data": (GREY_DARK, "||||"),
    "checkpoint save": (GREY_MID, "////"),
    "straggling": (GREY_MID, "xxxx"),
    "spare idle": (GREY_LIGHT, "////"),
    "shutdown": (GREY_DARK, "////"),
    "other": (GREY_MID, ""),
}


def wall_clock(table: pd.DataFrame, labels: dict[tuple[str, str], str]) -> Plot | None:
    """Stacked bars of ``table``: index (cell, arm kind), mean seconds of each class, ``useful``
    first.
    """
    if table.empty:
        return None
    title = _wall_finding(table)
    with drawing():
        fig = figure(WIDE, 96 + 44 * len(table))
        ax = axes(fig, grid="x")
        left = pd.Series(0.0, index=table.index)
        rows = range(len(table))
        for name in table.columns:
            colour, hatch = CLASS_LOOKS.get(name, OTHER_LOOK)
            widths = table[name].clip(lower=0)
            ax.barh(
                rows,
                widths,
                left=left,
                height=0.42,
                color=colour,
                hatch=hatch,
                edgecolor=PAPER,
                linewidth=0.6,
            )
            left += widths
        for y, key in enumerate(table.index):
            ax.text(
                0,
                y - 0.28,
                labels[key],
                va="bottom",
                ha="left",
                color=INK if key[1] == "faulted" else MUTED,
            )
        ax.set(xlim=(0, float(left.max()) * 1.02 or 1.0), ylim=(len(table) - 0.6, -0.72), yticks=[])
        ax.set(xlabel="seconds of wall clock, mean over the repeats")
        ax.spines["left"].set_visible(False)
        legend(
            fig,
            [(c, *CLASS_LOOKS.get(c, OTHER_LOOK)) for c in table.columns if table[c].sum() > 0],
        )
        svg = to_svg(
            fig,
            "wallclock",
            title,
            f"Stacked bars of {', '.join(map(str, table.columns))} in seconds.",
        )
    note = (
        "Useful time first, the rest is badput; waiting spares included; a bar ends at the wall"
        " clock."
    )
    return Plot(title=title, svg=svg, note=note)


def _wall_finding(table: pd.DataFrame) -> str:
    faulted = table[[kind == "faulted" for _, kind in table.index]]
    chosen = faulted if len(faulted) else table
    share = chosen["useful"] / chosen.sum(axis=1)
    rest = chosen.drop(columns="useful").sum()
    takes = percents(float(share.min()), float(share.max()))
    lead = f"Training that counts takes {takes} of the wall clock"
    return f"{lead}; most of the rest is {rest.idxmax()}" if len(rest) and rest.max() > 0 else lead
