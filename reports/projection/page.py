"""``report.html`` and ``results.json`` of a projection: one file each, which need no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.files import write_whole
from trainchaos.harness.projection.result import Compared, Projected, Projection
from trainchaos.reports.page.fill import TEMPLATES, fill
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
    drawing,
    figure,
    to_svg,
)
from trainchaos.reports.projection.words import (
    at,
    compared_figures,
    compared_said,
    findings,
    headline,
)

NAME, RESULTS = "report.html", "results.json"
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


def write(found: Projection, into: Path) -> None:
    """Write both files. Raises InfrastructureError where that is not possible."""
    try:
        into.mkdir(parents=True, exist_ok=True)
        write_whole(into / RESULTS, found.model_dump_json(indent=1) + "\n")
        write_whole(into / NAME, render(found))
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {into}: {error.strerror}", hint="give another directory: --into DIR"
        ) from error


def render(found: Projection) -> str:
    """The text of the page."""
    with drawing():
        plots = [_goodput(found), _badput(found)]
        beside = _beside(found.compared) if found.compared else ""
    context: dict[str, Any] = {
        "css": Markup("".join((TEMPLATES / n).read_text("utf-8") for n in CSS)),
        "found": found,
        "days": f"{found.setting.days:g}",
        "headline": headline(found),
        "findings": findings(found),
        "plots": [Markup(plot) for plot in plots],
        "beside": Markup(beside),
        "head": HEAD,
        "rows": [_cells(row) for row in found.rows],
        "compared_head": COMPARED,
        "compared": [_compared(one) for one in found.compared],
        "compared_said": compared_said(found),
        "setting": [
            (name, _shown(value))
            for name, value in found.setting.model_dump().items()
            if name not in UNSHOWN
        ],
    }
    return fill("projection.html.j2", context)


UNSHOWN = ("definitions", "gaps")
"""Definitions stand in sentences; the gaps of a trace are in results.json."""
CSS = ("report.css", "compare.css")
HEAD = (
    "GPUs",
    "strategy",
    "goodput",
    "mean, 95 % interval",
    "5 to 95 % of trials",
    "formula",
    "ETTR",
    "days to finish",
    "failures",
    "MTBF",
    "checkpoint each",
    "recovery",
    "GPU-hours lost",
    "of paid",
    "price",
    "of it lost",
)


COMPARED = (
    "ranks",
    "strategy",
    "projected",
    "95 % of such means",
    "measured",
    "arms",
    "mean, 95 % interval",
    "residual",
    "within",
    "failures an arm, projected",
    "measured",
    "a recovery",
    "from failures",
    "without failures",
)


def _compared(one: Compared) -> tuple[str, ...]:
    return (
        *compared_figures(one),
        "yes" if one.inside else "no",
        f"{one.failures_projected:.1f}",
        f"{one.failures_measured:.1f}",
        span(one.stall_s),
        f"{one.incidents}",
        f"{one.undisturbed:.4f}",
    )


def _cells(row: Projected) -> tuple[str, ...]:
    return (
        f"{row.gpus:,}",
        row.strategy,
        f"{row.goodput:.4f}",
        f"{row.low:.4f} to {row.high:.4f}",
        f"{row.worst:.4f} to {row.best:.4f}",
        "–" if row.closed is None else f"{row.closed:.4f}",
        f"{row.ettr:.4f}",
        "never" if row.finish_days is None else f"{row.finish_days:,.1f}",
        f"{row.failures:,.1f}",
        span(row.mtbf_s),
        span(row.interval_s),
        span(row.stall_s),
        f"{row.lost_gpu_hours:,.0f}",
        f"{row.gpu_hours:,.0f}",
        "–" if row.price is None else f"{row.price:,.0f}",
        "–" if row.lost_price is None else f"{row.lost_price:,.0f}",
    )


def span(seconds: float) -> str:
    """A time for people: ``45 s``, ``12.5 min``, ``3.1 h``, ``2.0 d``."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def _goodput(found: Projection) -> str:
    fig = figure(WIDE, HIGH)
    ax = axes(fig)
    sizes = sorted(found.setting.gpus)
    for number, name in enumerate(found.costs):
        rows = [row for gpus in sizes for row in at(found, gpus) if row.strategy == name]
        style, colour = _LINES[number % len(_LINES)]
        xs = [row.gpus for row in rows]
        ax.fill_between(
            xs, [r.worst for r in rows], [r.best for r in rows], color=colour, alpha=0.12, lw=0
        )
        mark = "o" if len(xs) == 1 else ""
        ax.plot(xs, [r.goodput for r in rows], style, marker=mark, color=colour, label=name)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [_short(one) for one in sizes])
    ax.set_xlabel("GPUs")
    ax.set_ylabel("goodput")
    ax.set_ylim(top=1.0)
    ax.legend(loc="best")
    said = ", ".join(f"{r.strategy} {r.goodput:.3f}" for r in at(found, sizes[-1]))
    return to_svg(fig, "goodput", "Goodput by size", f"At {sizes[-1]:,} GPUs: {said}")


def _beside(compared: Sequence[Compared]) -> str:
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


def _badput(found: Projection) -> str:
    """Where the time goes at the largest size."""
    fig = figure(WIDE, 60 + 44 * len(found.costs))
    ax = axes(fig, grid="x")
    rows = at(found, max(found.setting.gpus))[::-1]
    for number, row in enumerate(rows):
        left = 0.0
        for name, share in row.badput.items():
            ax.barh(number, share, left=left, color=_CLASS_COLOURS[name], height=0.6)
            left += share
    ax.set_yticks(range(len(rows)), [row.strategy for row in rows])
    ax.set_xlabel("share of the paid time that is not useful")
    named = [_key(name) for name in _CLASS_COLOURS if any(r.badput[name] for r in rows)]
    ax.legend(handles=named, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
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


def _shown(value: Any) -> str:
    """A setting for people: its numbers, separated by commas; a dash where it is left open."""
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
