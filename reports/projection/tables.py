"""Tables of a projection's page: goodput, where the rest goes, failures, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainchaos.chaos.units import enclosing, span
from trainchaos.harness.projection.result import Compared, Projected, Projection, Spread
from trainchaos.reports.content.tables import Table, table
from trainchaos.reports.projection.words import compared_figures, named

Cells = Mapping[str, Callable[[Projected], str]]
"""Head -> what a row says below it."""
DASH = "–"
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


def tables(found: Projection) -> dict[str, Table]:
    """All of them by id; none where nothing was projected."""
    if not found.rows:
        return {}
    shown = {
        "rows": _goodput(found),
        "classes": _badput(found),
        "failures": _failures(found),
        "paid": _paid(found),
    }
    return shown if found.setting.price is None else {**shown, "money": _money(found)}


def compared(jobs: list[Compared]) -> Table:
    """A row for each job that was compared."""
    rows = [
        (
            *compared_figures(one),
            "yes" if one.inside else "no",
            f"{one.failures_projected:.1f}",
            f"{one.failures_measured:.1f}",
            span(one.stall_s),
            one.incidents,
            f"{one.undisturbed:.4f}",
        )
        for one in jobs
    ]
    return table(COMPARED, rows)


def _table(found: Projection, title: str, note: str, cells: Cells) -> Table:
    """A row for each size and strategy."""
    rows = [
        (f"{row.gpus:,}", named(found, row.strategy), *(cell(row) for cell in cells.values()))
        for row in found.rows
    ]
    return table(("GPUs", "strategy", *cells), rows, [note], title)


def _goodput(found: Projection) -> Table:
    cells: Cells = {
        "goodput": lambda row: f"{row.goodput:.4f}",
        "mean, 95 % interval": lambda row: _to(row.low, row.high, 4),
        "5 to 95 % of jobs": lambda row: _to(row.worst, row.best, 4),
        "formula": lambda row: DASH if row.closed is None else f"{row.closed:.4f}",
        "ETTR": lambda row: f"{row.ettr:.4f}",
        "days to finish": lambda row: _days(row.finish_days),
        "days, 5 to 95 % of jobs": lambda row: _days_of(row.spreads["finish_days"]),
    }
    note = (
        "ETTR: spares not in the denominator. Days to finish: what takes"
        f" {found.setting.days:g} days without a failure, whatever the definitions."
    )
    return _table(found, "Goodput", note, cells)


def _badput(found: Projection) -> Table:
    classes = [name for name in found.rows[0].badput if any(r.badput[name] for r in found.rows)]

    def shares(name: str) -> Callable[[Projected], str]:
        def said(row: Projected) -> str:
            share, spread = row.badput[name], row.spreads.get(f"badput.{name}")
            if not share or spread is None:
                return f"{share:.5f}" if share else DASH
            half = max((spread.high or 0.0) - share, share - (spread.low or 0.0))
            return f"{share:.5f} ±{half:.5f}"

        return said

    note = "Shares of the paid time, with the 95 % interval of the mean."
    cells = {name: shares(name) for name in classes}
    return _table(found, "Time that is not useful, by class", note, cells)


def _failures(found: Projection) -> Table:
    batch = found.setting.batch
    unit = "steps" if batch is None else "samples"

    def counted(steps: float | None) -> str:
        return DASH if steps is None else f"{steps * (batch or 1):,.0f}"

    cells: dict[str, Callable[[Projected], str]] = {
        "failures": lambda row: f"{row.failures:,.1f}",
        "failures, 5 to 95 % of jobs": lambda row: _range(row.spreads["failures"]),
        "MTBF": lambda row: span(row.mtbf_s),
        "checkpoint each": lambda row: span(row.interval_s),
        "a recovery": lambda row: span(row.stall_s),
        "all in all": lambda row: span(row.recovery_s),
        f"{unit} done again": lambda row: counted(row.again),
        f"{unit} lost": lambda row: counted(row.short),
        f"{unit} lost, 5 to 95 % of jobs": lambda row: _range(row.spreads["short"], batch or 1),
    }
    if found.spares:
        needed = {one.gpus: one for one in found.spares}
        wanted = f"spares for {found.setting.availability:.12g}"
        cells[wanted] = lambda row: _needed(needed[row.gpus].spares)
    note = (
        "A recovery: median, from a failure until the job trains; all in all: mean, with loading"
        " and what the definitions charge to it. Lost: what failures kept from being done, of what"
        " the days have room for."
    )
    return _table(found, "Failures, and what each takes", note, cells)


def _paid(found: Projection) -> Table:
    note = (
        "A second of detection: what is lost if every failure is detected a second later, and won"
        " if it is a second sooner."
    )
    names = ("gpu_hours", "lost_gpu_hours", "second_gpu_hours")
    return _costs(found, "GPU-hours", "GPU-hours paid", note, *names)


def _money(found: Projection) -> Table:
    note = f"At {found.setting.price:g} a GPU-hour."
    return _costs(found, "Money", "price", note, "price", "lost_price", "second_price")


def _costs(
    found: Projection, title: str, first: str, note: str, paid: str, lost: str, second: str
) -> Table:
    """``paid``, ``lost``, ``second``: fields of a row."""
    cells: Cells = {
        first: lambda row: _count(getattr(row, paid)),
        "lost": lambda row: _count(getattr(row, lost)),
        "mean, 95 % interval": lambda row: _to(row.spreads[lost].low, row.spreads[lost].high),
        "5 to 95 % of jobs": lambda row: _range(row.spreads[lost]),
        "a second of detection": lambda row: _small(getattr(row, second) or 0.0),
    }
    return _table(found, title, note, cells)


def _needed(spares: int | None) -> str:
    return "more than a million" if spares is None else f"{spares:,}"


def _range(spread: Spread, unit: int = 1) -> str:
    low, high = (None if end is None else end * unit for end in (spread.least, spread.most))
    return _to(low, high)


def _days_of(spread: Spread) -> str:
    """A job that never ends takes infinitely many days."""
    low, high = (math.inf if end is None else end for end in (spread.least, spread.most))
    return _to(low, high, 1)


def _to(low: float | None, high: float | None, decimals: int = 0) -> str:
    return " to ".join(enclosing(low, high, decimals=decimals))


def _count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}"


def _days(value: float | None) -> str:
    return "never" if value is None else f"{value:,.1f}"


def _small(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


LABELS = {
    "gpus": "GPUs",
    "gpus_per_node": "GPUs of a node",
    "rate": "failures per 1,000 nodes and day",
    "rate_unsure": "half its 95 % interval, as a share",
    "days": "days",
    "trials": "jobs simulated",
    "seed": "seed",
    "save_s": "a checkpoint holds up, s",
    "load_s": "loading one, s",
    "interval_s": "between checkpoints, s",
    "step_s": "a step, s",
    "replica_nodes": "nodes of a copy of the model",
    "weibull": "Weibull shape of gaps",
    "several": "1, 2, ... nodes at once",
    "spares": "spare nodes of hot-spare",
    "repair_s": "repair, median, s",
    "repair_sigma": "repair, sigma of logarithms",
    "price": "price of a GPU-hour",
    "lemon_share": "share of lemons",
    "lemon_times": "lemons fail so many times as often",
    "quarantine": "failures until a lemon goes",
    "slow_rate": "nodes that become slow per 1,000 and day",
    "slow_factor": "a slow node makes a job take, times",
    "slow_found_s": "until it is found, s",
    "availability": "availability asked for",
    "processes": "failures of processes only",
    "batch": "samples of a step",
    "checkpoint_bytes": "bytes of a checkpoint",
    "bandwidth": "bytes a second of its storage",
    "causes": "causes",
    "loads_measured": "loading is in measured recoveries",
}
"""Of a setting, for people; definitions stand in sentences, the gaps of a trace in results.json."""


def settings(found: Projection) -> list[tuple[str, str]]:
    """Label and value of all that was asked."""
    values = found.setting.model_dump()
    return [(label, _shown(values[name])) for name, label in LABELS.items()]


def _shown(value: Any) -> str:
    """A setting for people: its numbers, separated by commas; a dash where it is left open."""
    if value is None:
        return DASH
    if isinstance(value, dict):
        return ", ".join(f"{name} {share:.3g}" for name, share in value.items()) or DASH
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or DASH
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
