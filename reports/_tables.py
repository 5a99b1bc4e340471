"""The tables of the report: columns with units in the head, cells formatted and aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from markupsafe import Markup, escape

from harness.judge.results import PHASE_NAMES, Finding, Incident, Results
from reports import _metrics
from reports._facts import (
    VERDICT_MARKS,
    Strategy,
    incidents_of,
    labels,
    nodes,
    phase_medians,
    strategies,
    where,
)
from reports._format import (
    MISSING,
    align,
    count_of,
    counted,
    median_of,
    number,
    pairs,
    parse_clause,
    quantity,
    range_of,
    with_unit,
)
from reports._strips import strip

MAX_ROWS = 2000
FINEST_S = 1e-4
WALL_FINEST_S = 1e-3
# The order of one arm's life: start, steady work, the fault and its repair, what is left.
WALL_CLASSES = (
    "useful",
    "initialisation",
    "data",
    "checkpoint save",
    "detection",
    "regroup",
    "restore",
    "recomputation",
    "degraded world",
    "straggling",
    "spare idle",
    "shutdown",
    "other",
)


@dataclass(frozen=True, kw_only=True)
class Column:
    """Head of a column; ``kind`` is text, number or wide (text that may wrap)."""

    name: str
    unit: str = ""
    kind: str = "text"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns and rows of ready cells; ``left_out`` rows were cut to keep the page readable."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Markup, ...], ...]
    notes: tuple[str, ...] = ()
    left_out: int = 0


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> Table:
    """Build a table: numbers of a column are aligned at the decimal point, plain strings are
    escaped.
    """
    kept = [list(row) for row in rows[:MAX_ROWS]]
    for i, column in enumerate(columns):
        if column.kind == "number":
            for row, text in zip(kept, align([row[i] for row in kept]), strict=True):
                row[i] = text if not isinstance(row[i], Markup) else row[i]
    cells = tuple(tuple(escape(cell) for cell in row) for row in kept)
    return Table(
        columns=tuple(columns), rows=cells, notes=tuple(notes), left_out=len(rows) - len(kept)
    )


def _number(name: str, unit: str = "") -> Column:
    return Column(name=name, unit=unit, kind="number")


def mark(verdict: str, label: str | None = None) -> Markup:
    """A verdict that reads without colour: sign and word."""
    sign = VERDICT_MARKS.get(verdict, "?")
    return Markup('<span class="v {}">{} {}</span>').format(
        verdict, sign, verdict if label is None else label
    )


def comparison(results: Results) -> Table:
    """Strategies side by side: what they give and what they cost."""
    columns = (
        Column(name="strategy"),
        Column(name="verdict"),
        _number("recovery", "s, median"),
        Column(name="range", unit="s"),
        _number("n"),
        _number("full rate", "s, median"),
        _number("redundant", "s, median"),
        _number("cost", "rank-hours a failure"),
        _number("lost steps", "median"),
        _number("lost samples", "median"),
        _number("goodput", "ratio, median"),
        _number("badput", "s, median"),
        Column(name="same result as without the fault"),
        _number("provisioned", "ranks"),
    )
    entries = strategies(results)
    notes = sorted({f"* {e.note}" for e in entries if e.note})
    return table(columns, [_comparison_row(e) for e in entries], notes)


def _comparison_row(e: Strategy) -> list[str]:
    star = "*" if e.note else ""
    return [
        e.label,
        mark(e.cell.verdict),
        median_of(e.recovery, alone=False),
        range_of(e.recovery),
        count_of(e.recovery),
        median_of(e.full_rate),
        median_of(e.redundancy),
        median_of(e.cost),
        median_of(e.steps_lost),
        median_of(e.samples_lost),
        median_of(e.goodput),
        number(e.badput_s),
        e.cell.exactness,
        MISSING if e.provisioned is None else f"{e.provisioned}{star}",
    ]


def slas(results: Results) -> Table:
    """Every clause with all its points against the limit."""
    columns = (
        Column(name="cell"),
        Column(name="metric"),
        Column(name="clause"),
        Column(name="verdict"),
        _number("observed"),
        Column(name="unit"),
        _number("n"),
        Column(name="every point, limit as a line"),
        Column(name="detail", kind="wide"),
    )
    names, rows = labels(results), []
    better = {(c.id, n): m.better for c in results.cells for n, m in c.metrics.items()}
    for sla in results.slas:
        where = (
            Markup(' <span class="quiet">line {}</span>').format(sla.line)
            if sla.line is not None
            else ""
        )
        soft = (
            Markup('<span class="quiet under">warning only</span>')
            if sla.severity == "warn"
            else ""
        )
        observed = quantity(sla.observed, sla.unit, better.get((sla.cell, sla.metric), "neither"))
        rows.append(
            [
                names.get(sla.cell, sla.cell),
                sla.metric,
                Markup("<code>{}</code>").format(sla.clause),
                mark(sla.verdict) + soft,
                observed,
                "" if sla.unit in ("1", "") else sla.unit,
                sla.counted,
                strip(sla),
                Markup("{}{}").format(
                    sla.detail or _margin(sla.clause, sla.observed, sla.unit), where
                ),
            ]
        )
    return table(columns, rows)


def _margin(text: str, observed: float | None, unit: str) -> str:
    clause = parse_clause(text)
    if clause is None or observed is None or clause.limit == observed:
        return ""
    return f"{with_unit(abs(clause.limit - observed), unit)} from the limit"


def faults(results: Results) -> Table:
    """Every incident: what was done, who saw it land, what the system made of it."""
    columns = (
        Column(name="cell"),
        Column(name="fault"),
        Column(name="target"),
        Column(name="struck at"),
        Column(name="landed, seen by"),
        Column(name="detected by"),
        _number("detection", "s"),
        _number("recovery", "s"),
        _number("full rate", "s"),
        _number("redundant", "s"),
        _number("lost steps"),
        Column(name="outcome"),
        Column(name="decision", kind="wide"),
    )
    names = labels(results)
    return table(
        columns,
        [_fault_row(names.get(i.cell, i.cell), i, where(results, i)) for i in results.faults],
    )


def _fault_row(cell: str, i: Incident, there: str) -> list[str]:
    again = f" #{i.occurrence}" if i.occurrence > 0 else ""
    blamed = f"blamed rank {i.blamed_rank}" if i.blamed_rank is not None else ""
    step = MISSING if i.step is None else f"step {i.step}"
    struck = _two(step, f"{number(i.injected_s)} s") if i.fired else MISSING
    landed = mark("pass", i.witness or "yes") if i.landed else mark("fail", "did not land")
    return [
        _two(cell, f"repeat {i.repeat}"),
        _two(Markup('<b class="fault">{}</b>{}').format(i.fault, again), i.kind),
        _two(pairs(i.target), there),
        struck,
        _two(landed, pairs(i.evidence)),
        _two(i.detected_by or MISSING, blamed),
        number(i.detection_time, "lower", FINEST_S),
        number(i.recovery_time, "lower", FINEST_S),
        number(i.time_to_full_rate, "lower", FINEST_S),
        number(i.time_to_redundancy, "lower", FINEST_S),
        lost_steps(i),
        _two(i.outcome, _healed(i)),
        i.decision,
    ]


def lost_steps(i: Incident) -> str:
    """How many; all, if the job never recovered; or with which other fault they were counted."""
    if i.never_recovered:
        return "all"
    return str(i.steps_lost) if i.answered_with is None else f"with {i.answered_with}"


def metrics(results: Results) -> Table:
    """Every metric of every cell."""
    kinds = ["number" if side == "r" else "text" for side in _metrics.SIDES]
    columns = [
        Column(name=name, kind=kind) for name, kind in zip(_metrics.HEAD, kinds, strict=True)
    ]
    return table(columns, [list(row) for row in _metrics.rows(results)], _metrics.absent(results))


def rates(results: Results) -> Table:
    """Survival, false alarms and spares of every cell."""
    kinds = ["number" if side == "r" else "text" for side in _metrics.RATE_SIDES]
    columns = [
        Column(name=name, kind=kind) for name, kind in zip(_metrics.RATES, kinds, strict=True)
    ]
    return table(columns, [list(row) for row in _metrics.rates(results)])


def _healed(i: Incident) -> str:
    if not i.fired:
        return "never fired"
    return "healed" if i.healed else mark("fail", "not healed")


def _two(first: str, second: str) -> Markup:
    """A cell of two lines, the second one quiet."""
    return Markup('{}<span class="quiet under">{}</span>').format(first, second)


def phases(results: Results) -> Table:
    """Median seconds of each recovery phase."""
    columns = [Column(name="strategy"), *(_number(p, "s") for p in PHASE_NAMES), _number("n")]
    names, rows = labels(results), []
    for cell in results.cells:
        found = incidents_of(results, cell.id)
        medians = phase_medians(found)
        if medians:
            cells = [number(medians.get(name), finest=FINEST_S) for name in PHASE_NAMES]
            rows.append(
                [names[cell.id], *cells, counted(sum(bool(i.phases) for i in found), len(found))]
            )
    return table(columns, rows)


def wall_seconds(results: Results) -> pd.DataFrame:
    """Mean seconds of each class, one row per (cell, arm kind); a row sums to the wall clock."""
    rows = [
        {"cell": arm.cell, "arm": arm.arm, "useful": arm.useful_s, "unexplained": arm.residual_s}
        | {name.replace("_", " "): seconds for name, seconds in arm.badput.items()}
        for arm in results.arms
    ]
    if not rows:
        return pd.DataFrame()
    frame = pd.DataFrame(rows).fillna(0.0).groupby(["cell", "arm"], sort=False).mean()
    known = {cell.id: n for n, cell in enumerate(results.cells)}
    order = sorted(
        frame.index, key=lambda key: (known.get(key[0], len(known)), key[0], key[1] != "faulted")
    )
    others = [c for c in frame.columns if c not in WALL_CLASSES and c != "unexplained"]
    columns = [*(c for c in WALL_CLASSES if c in frame.columns), *others, "unexplained"]
    return frame.loc[order, columns]


def wall_table(frame: pd.DataFrame, names: dict[str, str]) -> Table:
    """One column for each cell and arm kind, one row for each class, and the sum."""
    columns = [
        Column(name="class"),
        *(_number(names.get(cell, cell), f"{kind}, s") for cell, kind in frame.index),
    ]
    rows = [
        [str(name), *(number(float(v), finest=WALL_FINEST_S) for v in frame[name])]
        for name in frame.columns
        if frame[name].any()
    ]
    total = ["wall clock", *(number(float(v), finest=WALL_FINEST_S) for v in frame.sum(axis=1))]
    return table(columns, [*rows, total])


def machines(results: Results) -> Table:
    """Every node of the run: which machine it was, who ran there, how it was lost."""
    columns = (
        Column(name="node"),
        Column(name="host"),
        Column(name="address"),
        Column(name="devices"),
        Column(name="processes", kind="wide"),
        _number("clock", "±s"),
        Column(name="lost", kind="wide"),
    )
    rows = [
        [
            str(n.number),
            n.host,
            n.address,
            n.devices,
            n.processes,
            number(n.clock_bound_s) if n.clock_bound_s else MISSING,
            "; ".join(n.lost),
        ]
        for n in nodes(results)
    ]
    return table(columns, rows)


def arms(results: Results) -> Table:
    """Every run of training, faulted and control."""
    columns = (
        Column(name="arm"),
        _number("seed"),
        Column(name="outcome"),
        _number("steps", "committed"),
        _number("asked", "steps"),
        _number("wall clock", "s"),
        _number("useful", "s"),
        _number("goodput", "ratio"),
        _number("unexplained", "s"),
        _number("step time", "s, median"),
        _number("provisioned", "ranks"),
        Column(name="reason", kind="wide"),
    )
    rows = [
        [
            a.id,
            str(a.seed),
            a.outcome,
            str(a.committed_step),
            str(a.steps),
            number(a.wall_s),
            number(a.useful_s),
            number(a.goodput, "higher"),
            number(a.residual_s),
            number(a.step_time_median),
            str(a.provisioned_ranks),
            a.reason,
        ]
        for a in results.arms
    ]
    return table(columns, rows)


@dataclass(frozen=True, kw_only=True)
class InvariantRow:
    """One invariant over all cells; ``arms`` holds (arm id, finding) for the expandable part."""

    name: str
    cells: tuple[Markup, ...]
    loud: tuple[tuple[str, Finding], ...]
    findings: tuple[tuple[str, Finding], ...]
    arms: tuple[tuple[str, Finding], ...]


def invariants(results: Results) -> list[InvariantRow]:
    """One row per invariant, in the order they first appear."""
    names = list(dict.fromkeys(name for cell in results.cells for name in cell.invariants))
    called, rows = labels(results), []
    for name in names:
        found = [(called[c.id], c.invariants.get(name)) for c in results.cells]
        present = tuple((cell, finding) for cell, finding in found if finding is not None)
        rows.append(
            InvariantRow(
                name=name,
                cells=tuple(Markup(MISSING) if f is None else mark(f.verdict) for _, f in found),
                loud=tuple((cell, f) for cell, f in present if f.verdict != "pass"),
                findings=present,
                arms=tuple(
                    (a.id, a.invariants[name]) for a in results.arms if name in a.invariants
                ),
            )
        )
    return rows
