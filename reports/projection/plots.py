"""Plots of a projection's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainchaos.harness.projection.result import Compared, Projection
from trainchaos.reports.page.svg import (
    FAULT,
    FAULT_WASH,
    GREY_DARK,
    GREY_LIGHT,
    GREY_MID,
    INK,
    RECOVERY,
    RECOVERY_SOFT,
    axes,
    figure,
    to_svg,
)
from trainchaos.reports.projection.words import at, named

WIDE, HIGH = 640, 300
_LINES = (("-", RECOVERY), ("--", FAULT), (":", INK), ("-.", GREY_DARK))
_CLASS_COLOURS = {
    "rework": FAULT,
    "restart": RECOVERY,
    "stall": RECOVERY_SOFT,
    "waiting": GREY_DARK,
    "saving": GREY_MID,
    "reduced": INK,
    "slow": FAULT_WASH,
    "spares": GREY_LIGHT,
}


def goodput(found: Projection) -> str:
    """Goodput by size: marks at those that were asked for."""
    fig = figure(WIDE, HIGH)
    ax = axes(fig)
    asked = sorted(found.setting.gpus)
    for number, name in enumerate(found.costs):
        rows = [row for gpus in asked for row in at(found, gpus) if row.strategy == name]
        points = {point.gpus: point.goodput for point in found.curve if point.strategy == name}
        points |= {row.gpus: row.goodput for row in rows}
        style, colour = _LINES[number % len(_LINES)]
        xs = [row.gpus for row in rows]
        ax.fill_between(
            xs, [r.worst for r in rows], [r.best for r in rows], color=colour, alpha=0.12, lw=0
        )
        label = named(found, name)
        ax.plot(sorted(points), [points[x] for x in sorted(points)], style, color=colour)
        ax.plot(xs, [r.goodput for r in rows], style, marker="o", ms=3, color=colour, label=label)
    sizes = sorted({*asked, *(point.gpus for point in found.curve)})
    _by_size(ax, sizes)
    ax.set_ylabel("goodput")
    ax.set_ylim(top=1.0)
    ax.legend(loc="best")
    said = ", ".join(f"{r.strategy} {r.goodput:.3f}" for r in at(found, asked[-1]))
    return to_svg(fig, "goodput", "Goodput by size", f"At {asked[-1]:,} GPUs: {said}")


def seconds(found: Projection) -> str:
    """What a second of detection costs at each size; empty at one size or without a failure."""
    sizes = sorted(found.setting.gpus)
    if len(sizes) < 2 or not any(row.second_gpu_hours > 0 for row in found.rows):
        return ""
    fig = figure(WIDE, HIGH)
    ax = axes(fig)
    for number, name in enumerate(found.costs):
        rows = [row for gpus in sizes for row in at(found, gpus) if row.strategy == name]
        style, colour = _LINES[number % len(_LINES)]
        worth = [row.second_gpu_hours for row in rows]
        ax.plot(sizes, worth, style, color=colour, label=named(found, name))
    _by_size(ax, sizes)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.set_ylabel("GPU-hours")
    ax.legend(loc="best")
    said = ", ".join(f"{r.strategy} {r.second_gpu_hours:.3g}" for r in at(found, sizes[-1]))
    return to_svg(fig, "seconds", "Cost of a second", f"At {sizes[-1]:,} GPUs: {said}")


def _by_size(ax: Any, sizes: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [_short(one) for one in sizes])
    ax.minorticks_off()
    ax.set_xlabel("GPUs")


def beside(compared: Sequence[Compared]) -> str:
    """Projected intervals, and what was measured, a row for each job."""
    fig = figure(WIDE, 70 + 26 * len(compared))
    ax = axes(fig, grid="x")
    rows = list(compared)[::-1]
    for number, one in enumerate(rows):
        ax.plot([one.low, one.high], [number, number], color=GREY_MID, lw=6, alpha=0.7)
        ax.plot([one.projected], [number], "|", color=INK, markersize=12)
        ax.plot(one.measured, [number] * len(one.measured), ".", color=RECOVERY)
        ax.plot([one.mean], [number], "D", color=RECOVERY if one.inside else FAULT)
    ax.set_yticks(range(len(rows)), [f"{one.strategy}, {one.ranks} ranks" for one in rows])
    ax.set_xlabel("goodput from the first step to the last")
    said = "; ".join(
        f"{one.strategy} at {one.ranks} ranks: projected {one.projected:.3f}, measured"
        f" {one.mean:.3f}"
        for one in compared
    )
    return to_svg(fig, "compared", "Projected against measured goodput", said)


def badput(found: Projection) -> str:
    """Where the time goes at the largest size."""
    fig = figure(WIDE, 60 + 44 * len(found.costs))
    ax = axes(fig, grid="x")
    rows = at(found, max(found.setting.gpus))[::-1]
    for number, row in enumerate(rows):
        left = 0.0
        for name, share in row.badput.items():
            ax.barh(number, share, left=left, color=_CLASS_COLOURS[name], height=0.6)
            left += share
    ax.set_yticks(range(len(rows)), [named(found, row.strategy) for row in rows])
    ax.set_xlabel("share of the paid time that is not useful")
    keys = [_key(name) for name in _CLASS_COLOURS if any(r.badput[name] for r in rows)]
    ax.legend(handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    said = "; ".join(
        f"{row.strategy}: "
        + ", ".join(f"{name} {share:.4f}" for name, share in row.badput.items() if share)
        for row in rows[::-1]
    )
    return to_svg(fig, "badput", "Time that is not useful, at the largest size", said)


def _key(name: str) -> Any:
    """The mark of a class in the legend."""
    from matplotlib.patches import Patch

    return Patch(color=_CLASS_COLOURS[name], label=name)


def _short(gpus: int) -> str:
    return f"{gpus // 1024}K" if gpus >= 1024 and gpus % 1024 == 0 else f"{gpus}"
