"""Plots of a projection's page."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from trainchaos.harness.projection.result import Compared, Projection
from trainchaos.reports.page.charts import AxisScale, Chart, Point, Times, stacked, times
from trainchaos.reports.page.lines import Line, Panel, plot
from trainchaos.reports.projection.words import at, named

KINDS = 4
"""Colours and dashes of lines, which begin again after so many strategies."""
CLASSES = ("rework", "restart", "stall", "waiting", "saving", "reduced", "slow", "spares")


def goodput(found: Projection) -> Markup:
    """Goodput by size, with the range of 90 % of jobs at those that were asked for."""
    points = {
        name: {p.gpus: p.goodput for p in found.curve if p.strategy == name}
        | {r.gpus: r.goodput for r in found.rows if r.strategy == name}
        for name in found.costs
    }
    bars = [
        Line(kind=f"s{number % KINDS}", points=[(row.gpus, row.worst), (row.gpus, row.best)])
        for number, name in enumerate(found.costs)
        for row in found.rows
        if row.strategy == name
    ]
    known = [value for curve in points.values() for value in curve.values()]
    known += [value for bar in bars for _, value in bar.points]
    scale = AxisScale([*known, 1.0], room=98.0, zero=False)
    largest = max(found.setting.gpus)
    said = ", ".join(f"{r.strategy} {r.goodput:.3f}" for r in at(found, largest))
    return _by_size(f"Goodput at {largest:,} GPUs: {said}", points, "goodput", scale, bars)


def seconds(found: Projection) -> Markup:
    """What a second of detection costs at each size; empty at one size or without a failure."""
    sizes = found.setting.gpus
    if len(sizes) < 2 or not any(row.second_gpu_hours > 0 for row in found.rows):
        return Markup("")
    points = {
        name: {r.gpus: r.second_gpu_hours for r in found.rows if r.strategy == name}
        for name in found.costs
    }
    known = [value for curve in points.values() for value in curve.values()]
    scale = AxisScale(known, logarithmic=True, room=98.0)
    rows = at(found, max(sizes))
    said = ", ".join(f"{r.strategy} {r.second_gpu_hours:.3g}" for r in rows)
    words = f"Cost of a second at {max(sizes):,} GPUs: {said}"
    return _by_size(words, points, "GPU-hours", scale)


def _by_size(
    words: str,
    points: dict[str, dict[int, float]],
    name: str,
    scale: AxisScale,
    bars: Sequence[Line] = (),
) -> Markup:
    sizes = sorted({gpus for curve in points.values() for gpus in curve})
    across = AxisScale([float(size) for size in sizes], logarithmic=True, room=98.0)
    lines = [
        Line(kind=f"s{number % KINDS}", points=[(float(x), curve[x]) for x in sorted(curve)])
        for number, curve in enumerate(points.values())
    ]
    panel = Panel(name=name, scale=scale, lines=lines, bars=bars, high=220.0)
    ticks = [(float(size), _short(size)) for size in sizes]
    return plot(words, [panel], across, "GPUs", ticks)


def legend(found: Projection) -> list[tuple[int, str]]:
    """The number of a line's colour, and the strategy."""
    return [(number % KINDS, named(found, name)) for number, name in enumerate(found.costs)]


def beside(compared: Sequence[Compared]) -> Chart:
    """Projected intervals, and what was measured, a row for each job."""
    rows = [
        Times(
            name=f"{one.strategy}, {one.ranks} ranks",
            points=[Point(value=value) for value in one.measured]
            + [Point(value=one.mean, words="mean", flagged=True, out=not one.inside)],
            median=one.projected,
            bounds=(one.low, one.high),
            value=f"{one.projected:.3f}; {one.mean:.3f}",
        )
        for one in compared
    ]
    title = "Goodput from the first step to the last: projected; measured"
    return times(title, rows, logarithmic=False, unit="goodput")


def badput(found: Projection) -> Chart:
    """Where the time goes at the largest size."""
    shares = {
        named(found, row.strategy): {name: part for name, part in row.badput.items() if part}
        for row in at(found, max(found.setting.gpus))
    }
    values = {label: f"{sum(parts.values()):.4f}" for label, parts in shares.items()}
    title = "Time that is not useful"
    return stacked(title, shares, values, CLASSES, "of the paid time", "share of the paid time")


def _short(gpus: int) -> str:
    return f"{gpus // 1024}K" if gpus >= 1024 and gpus % 1024 == 0 else f"{gpus}"
