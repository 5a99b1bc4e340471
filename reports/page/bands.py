"""Values of lines, shown where a plot is pointed at: invisible bands over the whole height, each
with the values of its stretch, since a line of hundreds of points is one mark.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes

from trainchaos.reports.content.figures import enclosing, number
from trainchaos.reports.content.series import Pair
from trainchaos.reports.page.svg import Band

MOST = 40
"""Bands of a plot."""


def of_throughput(
    ax: Axes, pair: Pair, faulted: pd.DataFrame, control: pd.DataFrame | None
) -> Iterator[Band]:
    """The median rate of each stretch, and that of the unfaulted arm in the same time."""
    unit, times = pair.faulted.rate_unit, faulted["time_s"]
    # the first rate is of the time since a point that is not drawn
    usual = float(times.diff().median()) if len(times) > 1 else 0.0
    before = max(0.0, float(times.iloc[0]) - usual) if len(times) else 0.0
    for part in _parts(faulted):
        end = float(part["time_s"].iloc[-1])
        words = f"{_span(before, end)} s: {number(float(part['rate'].median()))} {unit}"
        if control is not None:
            same = control[(control["time_s"] > before) & (control["time_s"] <= end)]["rate"]
            if len(same):
                words += f"; {number(float(same.median()))} without the fault"
        yield Band(ax=ax, low=before, high=end, words=words)
        before = end


def of_loss(ax: Axes, faulted: pd.Series, control: pd.Series) -> Iterator[Band]:
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
    size = max(1, -(-len(frame) // MOST))
    for start in range(0, len(frame), size):
        yield frame.iloc[start : start + size]


def _span(low: float, high: float) -> str:
    return " to ".join(enclosing(low, high))
