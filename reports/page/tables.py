"""The tables of the report: columns with units in the head, cells formatted and aligned."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.harness.judge.incident import PHASE_NAMES, Incident
from trainchaos.harness.judge.results import Finding, Results, merge
from trainchaos.reports.content import metric_rows
from trainchaos.reports.content.facts import (
    StrategyFacts,
    incidents_of,
    labels,
    nodes,
    phase_medians,
    strategies,
    where,
)
from trainchaos.reports.content.figures import (
    MISSING,
    counted,
    number,
    pairs,
    parse_clause,
    quantity,
    with_unit,
)
from trainchaos.reports.page.strips import strip
from trainchaos.reports.page.table import (
    PageColumn,
    PageTable,
    defined,
    mark,
    measured,
    numeric,
    table,
    two_lines,
)

FINEST_S = 1e-4
MAX_ARMS_OF_ONE = 40  # of an invariant; those that do not pass come first


def comparison(results: Results) -> PageTable:
    """Strategies side by side: their benefits and costs."""
    columns = (
        PageColumn(name="strategy"),
        PageColumn(name="verdict"),
        measured("recovery", "recovery_time", "s, median"),
        PageColumn(name="range", unit="s", about="least and greatest recovery time"),
        numeric("n", about="incidents with a recovery time"),
        measured("full rate", "time_to_full_rate", "s, median"),
        measured("redundant", "time_to_redundancy", "s, median"),
        measured("cost", "failure_cost", "rank-hours a failure"),
        measured("lost steps", "steps_lost", "median"),
        measured("lost samples", "samples_lost", "median"),
        measured("goodput", "goodput", "ratio, median"),
        numeric("badput", "s, median", "wall time of an arm that was not useful"),
        PageColumn(name="same result as without the fault"),
        numeric("provisioned", "ranks", "ranks and spares that were paid for"),
    )
    entries = strategies(results)
    notes = sorted({f"* {e.note}" for e in entries if e.note})
    return table(columns, [_comparison_row(e) for e in entries], notes)


def _comparison_row(e: StrategyFacts) -> list[str]:
    star = "*" if e.note else ""
    return [
        e.label,
        mark(e.cell.verdict),
        *e.figures,
        MISSING if e.provisioned is None else f"{e.provisioned}{star}",
    ]


def slas(results: Results, verdict: str) -> PageTable:
    """Every clause of one verdict with all its points against the limit."""
    columns = (
        PageColumn(name="cell"),
        PageColumn(name="metric"),
        PageColumn(name="clause"),
        PageColumn(name="verdict"),
        numeric("observed"),
        PageColumn(name="unit"),
        numeric("n"),
        PageColumn(name="every point, limit as a line"),
        PageColumn(name="detail", kind="wide"),
    )
    names, rows = labels(results), []
    better = {(c.id, n): m.better for c in results.cells for n, m in c.metrics.items()}
    for sla in results.slas:
        if sla.verdict != verdict:
            continue
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
                defined(sla.metric),
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


def faults(results: Results) -> PageTable:
    """Every incident: the fault, the evidence that it landed, and the system's reaction."""
    columns = (
        PageColumn(name="cell"),
        PageColumn(name="fault"),
        PageColumn(name="target"),
        PageColumn(name="struck at"),
        PageColumn(name="landed, seen by"),
        PageColumn(name="detected by"),
        measured("detection", "detection_time", "s"),
        measured("recovery", "recovery_time", "s"),
        measured("full rate", "time_to_full_rate", "s"),
        measured("redundant", "time_to_redundancy", "s"),
        measured("lost steps", "steps_lost"),
        PageColumn(name="outcome"),
        PageColumn(name="decision", kind="wide"),
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
    struck = two_lines(step, f"{number(i.injected_s)} s") if i.fired else MISSING
    landed = mark("pass", i.witness or "yes") if i.landed else mark("fail", "did not land")
    return [
        two_lines(cell, f"repeat {i.repeat}"),
        two_lines(Markup('<b class="fault">{}</b>{}').format(i.fault, again), i.kind),
        two_lines(pairs(i.target), there),
        struck,
        two_lines(landed, pairs(i.evidence)),
        two_lines(i.detected_by or MISSING, blamed),
        number(i.detection_time, "lower", FINEST_S),
        number(i.recovery_time, "lower", FINEST_S),
        number(i.time_to_full_rate, "lower", FINEST_S),
        number(i.time_to_redundancy, "lower", FINEST_S),
        lost_steps(i),
        two_lines(i.outcome, _healed(i)),
        i.decision,
    ]


def lost_steps(i: Incident) -> str:
    """Number of lost steps; ``all`` if the job never recovered; or the fault with which they were
    counted.
    """
    return i.lost if i.never_recovered or i.answered_with is None else f"with {i.answered_with}"


def metrics(results: Results) -> PageTable:
    """Every metric of every cell."""
    kinds = ["number" if side == "r" else "text" for side in metric_rows.SIDES]
    columns = [
        PageColumn(name=name, kind=kind) for name, kind in zip(metric_rows.HEAD, kinds, strict=True)
    ]
    rows = [[row[0], defined(row[1]), *row[2:]] for row in metric_rows.rows(results)]
    notes = [*metric_rows.to_see(results), *metric_rows.absent(results)]
    return table(columns, rows, notes)


def rates(results: Results) -> PageTable:
    """Survival, false alarms and spares of every cell."""
    kinds = ["number" if side == "r" else "text" for side in metric_rows.RATE_SIDES]
    columns = [
        PageColumn(name=name, kind=kind)
        for name, kind in zip(metric_rows.RATES, kinds, strict=True)
    ]
    return table(columns, [list(row) for row in metric_rows.rates(results)])


def _healed(i: Incident) -> str:
    if not i.fired:
        return "never fired"
    return "healed" if i.healed else mark("fail", "not healed")


def phases(results: Results) -> PageTable:
    """Median seconds of each recovery phase."""
    columns = [PageColumn(name="strategy"), *(numeric(p, "s") for p in PHASE_NAMES), numeric("n")]
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


def machines(results: Results) -> PageTable:
    """Every node of the run: its machine, its processes, how it was lost."""
    columns = (
        PageColumn(name="node"),
        PageColumn(name="host"),
        PageColumn(name="address"),
        PageColumn(name="devices"),
        PageColumn(name="processes", kind="wide"),
        numeric("clock", "±s"),
        PageColumn(name="lost", kind="wide"),
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


def arms(results: Results) -> PageTable:
    """Every run of training, faulted and control."""
    columns = (
        PageColumn(name="arm"),
        numeric("seed"),
        PageColumn(name="outcome"),
        numeric("steps", "committed"),
        numeric("asked", "steps"),
        numeric("wall clock", "s"),
        numeric("useful", "s"),
        numeric("goodput", "ratio"),
        numeric("unexplained", "s"),
        numeric("step time", "s, median"),
        numeric("provisioned", "ranks"),
        PageColumn(name="reason", kind="wide"),
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
    """One invariant over all cells; ``arms`` holds (arm id, finding) for the expandable part,
    ``more`` arms are left out there. ``verdict``: the worst of the cells.
    """

    name: str
    cells: tuple[Markup, ...]
    loud: tuple[tuple[str, Finding], ...]
    findings: tuple[tuple[str, Finding], ...]
    arms: tuple[tuple[str, Finding], ...]
    more: int
    verdict: str


def invariants(results: Results) -> list[InvariantRow]:
    """One row per invariant, in the order they first appear."""
    names = list(dict.fromkeys(name for cell in results.cells for name in cell.invariants))
    called, rows = labels(results), []
    for name in names:
        found = [(called[c.id], c.invariants.get(name)) for c in results.cells]
        present = tuple((cell, finding) for cell, finding in found if finding is not None)
        arms = [(a.id, a.invariants[name]) for a in results.arms if name in a.invariants]
        arms.sort(key=lambda one: one[1].verdict == "pass")
        rows.append(
            InvariantRow(
                name=name,
                cells=tuple(Markup(MISSING) if f is None else mark(f.verdict) for _, f in found),
                loud=tuple((cell, f) for cell, f in present if f.verdict != "pass"),
                findings=present,
                arms=tuple(arms[:MAX_ARMS_OF_ONE]),
                more=max(0, len(arms) - MAX_ARMS_OF_ONE),
                verdict=merge([finding.verdict for _, finding in present]),
            )
        )
    return rows
