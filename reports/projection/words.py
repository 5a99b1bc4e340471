"""What a projection says, in sentences: best strategies, where they change, what a second costs."""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.harness.projection.result import Compared, Projected, Projection
from trainchaos.reports.content.figures import percent

APART = 4.0
"""Standard errors from which on the page says that the two engines differ: chance alone exceeds it
once in 16,000 rows.
"""
MATTERS = 1e-3
"""Goodput; a smaller difference between the engines changes no decision."""


def headline(found: Projection) -> str:
    """The best and the worst strategy at the largest size."""
    largest = max(found.setting.gpus)
    rows = sorted(at(found, largest), key=lambda row: -row.goodput)
    best, worst = rows[0], rows[-1]
    said = f"At {largest:,} GPUs {best.strategy} keeps {percent(best.goodput)} of the time"
    if len(rows) == 1:
        return said
    saved = worst.lost_gpu_hours - best.lost_gpu_hours
    return (
        f"{said}, {worst.strategy} {percent(worst.goodput)}: {saved:,.0f} GPU-hours in"
        f" {found.setting.days:g} days"
    )


def findings(found: Projection) -> list[str]:
    """Where the best strategy changes, what a second is worth, and where the engines differ."""
    return [*_changes(found), _second(found), *spares_said(found), *_apart(found)]


def compared_said(found: Projection) -> str:
    """How many jobs are where they were projected to be; empty without a comparison."""
    if not found.compared:
        return ""
    inside = sum(one.inside for one in found.compared)
    return (
        f"{inside} of {len(found.compared)} jobs are within the projected interval; costs of"
        f" recovery from {found.compared[0].costs_from}, none from the arms that are compared;"
        " from the first step to the last, spares not counted"
    )


def spares_said(found: Projection) -> list[str]:
    """The spares that the availability asked for takes, a line for each size."""
    wanted = found.setting.availability
    return [
        f"{one.gpus:,} GPUs: spare nodes that keep all {one.nodes:,} nodes there {wanted:.4g} of"
        f" the time: {'more than a million' if one.spares is None else f'{one.spares:,}'}"
        f" ({one.load:.3g} in repair on average)"
        for one in found.spares
    ]


def at(found: Projection, gpus: int) -> list[Projected]:
    """The rows of a size."""
    return [row for row in found.rows if row.gpus == gpus]


def _changes(found: Projection) -> list[str]:
    """Break-even points, as far as the sizes tell."""
    said, before = [], None
    for gpus in sorted(found.setting.gpus):
        best = found.best_at(gpus)
        if before is not None and best.strategy != before.strategy:
            said.append(
                f"Between {before.gpus:,} and {gpus:,} GPUs {best.strategy} overtakes"
                f" {before.strategy}."
            )
        before = best
    return said


def _second(found: Projection) -> str:
    largest = max(found.setting.gpus)
    row = max(at(found, largest), key=lambda one: one.failures)
    hours = row.failures * row.gpus / 3600.0
    return (
        f"Each second less in a recovery is worth {hours:,.{0 if hours > 100 else 1}f} GPU-hours in"
        f" {found.setting.days:g} days at {largest:,} GPUs ({row.failures:,.0f} failures)."
    )


def _apart(found: Projection) -> Sequence[str]:
    """Rows whose engines differ by more than chance."""
    return [
        f"Formula ({row.closed:.4f}) and simulation ({row.goodput:.4f}) of {row.strategy} at"
        f" {row.gpus:,} GPUs differ by {row.apart:.1f} standard errors: the formula's assumptions"
        " do not hold there; take the simulation."
        for row in found.rows
        if row.apart is not None and row.closed is not None and row.apart > APART
        if abs(row.closed - row.goodput) > MATTERS
    ]


def compared_figures(one: Compared) -> tuple[str, ...]:
    """A compared job as a row: ranks, strategy, projected with its interval, measured, its arms and
    interval, and the residual.
    """
    low, high = one.measured_low, one.measured_high
    return (
        f"{one.ranks}",
        one.strategy,
        f"{one.projected:.4f}",
        f"{one.low:.4f} to {one.high:.4f}",
        f"{one.mean:.4f}",
        f"{len(one.measured)}",
        "–" if low is None else f"{low:.4f} to {high:.4f}",
        f"{one.residual:+.4f}",
    )
