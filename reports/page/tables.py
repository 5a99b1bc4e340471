"""The tables of a run's page; timelines, post-mortems and earlier runs with what is beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.chaos.units import (
    MISSING,
    counted,
    number,
    pairs,
    plural,
    quantity,
    with_unit,
)
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import PHASE_NAMES, Incident
from trainchaos.harness.judge.results import Finding, Results, SlaResult, merge
from trainchaos.reports.content import metric_rows
from trainchaos.reports.content.facts import (
    VERDICT_MARKS,
    StrategyFacts,
    incidents_of,
    labels,
    nodes,
    phase_medians,
    strategies,
    where,
)
from trainchaos.reports.content.figures import clause_of, few, range_of
from trainchaos.reports.content.history import History
from trainchaos.reports.content.postmortems import PostMortem
from trainchaos.reports.content.tables import (
    Cell,
    Column,
    Table,
    by_sides,
    defined,
    mark,
    measured,
    numeric,
    stacked,
    table,
    wide,
)
from trainchaos.reports.content.timeline import Timeline
from trainchaos.reports.page import strips

FINEST_S = 1e-4
WALL_FINEST_S = 1e-3
MANY = 4
"""With more arms than this, only those that did not end well are open."""
MAX_PAST_CELLS = 6
NAMES = {
    "first": "hit",
    "shown": "first signal",
    "blame": "blamed",
    "cheaper": "would have cost less",
    "reads as": "the log alone reads as",
    "to do": "recommended action",
    "warns": "warning",
    "waits": "collectives",
}
"""What the page calls a label of ``facts_of``; others keep their name."""
MAX_ARMS_OF_ONE = 40  # of an invariant; those that do not pass come first


def comparison(results: Results) -> Table:
    """Strategies side by side: their benefits and costs."""
    columns = (
        "strategy",
        "verdict",
        measured("recovery", "recovery_time", "s, median"),
        Column(name="range", unit="s", about="least and greatest recovery time"),
        numeric("n", about="incidents with a recovery time"),
        measured("full rate", "time_to_full_rate", "s, median"),
        measured("redundant", "time_to_redundancy", "s, median"),
        measured("cost", "failure_cost", "rank-hours a failure"),
        measured("lost steps", "steps_lost", "median"),
        measured("lost samples", "samples_lost", "median"),
        measured("goodput", "goodput", "ratio, median"),
        numeric("badput", "s, median", "wall time of an arm that was not useful"),
        "same result as without the fault",
        numeric("provisioned", "ranks", "ranks and spares that were paid for"),
    )
    entries = strategies(results)
    notes = sorted({f"* {e.note}" for e in entries if e.note})
    return table(columns, [_comparison_row(e) for e in entries], notes)


def _comparison_row(e: StrategyFacts) -> list[str | Cell]:
    star = "*" if e.note else ""
    return [
        e.label,
        mark(e.cell.verdict),
        *e.figures,
        MISSING if e.provisioned is None else f"{e.provisioned}{star}",
    ]


def slas(results: Results, verdict: str) -> Table:
    """Every clause of one verdict with all its points against the limit."""
    columns = (
        "cell",
        "metric",
        "clause",
        "verdict",
        numeric("observed"),
        "unit",
        numeric("n"),
        "every point, limit as a line",
        wide("detail"),
    )
    names, rows = labels(results), []
    better = {(c.id, n): m.better for c in results.cells for n, m in c.metrics.items()}
    for sla in results.slas:
        if sla.verdict != verdict:
            continue
        unit = "" if sla.unit == "1" else sla.unit
        rows.append(
            [
                names.get(sla.cell, sla.cell),
                defined(sla.metric),
                Markup("<code>{}</code>").format(sla.clause),
                stacked(mark(sla.verdict), "warning only" if sla.severity == "warn" else ""),
                quantity(sla.observed, sla.unit, better.get((sla.cell, sla.metric), "neither")),
                unit,
                sla.counted,
                strips.of_clause(sla),
                stacked(sla.detail or _margin(sla), f"line {sla.line}" if sla.line else ""),
            ]
        )
    return table(columns, rows)


def _margin(sla: SlaResult) -> str:
    clause = clause_of(sla)
    if clause is None or sla.observed is None or clause.limit == sla.observed:
        return ""
    return f"{with_unit(abs(clause.limit - sla.observed), sla.unit)} from the limit"


def faults(results: Results) -> Table:
    """Every incident: the fault, the evidence that it landed, and the system's reaction."""
    columns = (
        "cell",
        "fault",
        "target",
        "struck at",
        "landed, seen by",
        "detected by",
        measured("detection", "detection_time", "s"),
        measured("recovery", "recovery_time", "s"),
        measured("full rate", "time_to_full_rate", "s"),
        measured("redundant", "time_to_redundancy", "s"),
        measured("lost steps", "steps_lost"),
        "outcome",
        wide("decision"),
    )
    names = labels(results)
    return table(
        columns,
        [_fault_row(names.get(i.cell, i.cell), i, where(results, i)) for i in results.faults],
    )


def _fault_row(cell: str, i: Incident, there: str) -> list[str | Cell]:
    again = f" #{i.occurrence}" if i.occurrence > 0 else ""
    blamed = f"blamed rank {i.blamed_rank}" if i.blamed_rank is not None else ""
    step = MISSING if i.step is None else f"step {i.step}"
    struck = stacked(step, f"{number(i.injected_s)} s") if i.fired else MISSING
    landed = mark("pass", i.witness or "yes") if i.landed else mark("fail", "did not land")
    return [
        stacked(cell, f"repeat {i.repeat}"),
        stacked(Markup('<b class="fault">{}</b>{}').format(i.fault, again), i.kind),
        stacked(pairs(i.target), there),
        struck,
        stacked(landed, pairs(i.evidence)),
        stacked(i.detected_by or MISSING, blamed),
        number(i.detection_time, "lower", FINEST_S),
        number(i.recovery_time, "lower", FINEST_S),
        number(i.time_to_full_rate, "lower", FINEST_S),
        number(i.time_to_redundancy, "lower", FINEST_S),
        lost_steps(i),
        stacked(i.outcome, _healed(i)),
        i.decision,
    ]


def lost_steps(i: Incident) -> str:
    """Number of lost steps; ``all`` if the job never recovered; or the fault with which they were
    counted.
    """
    return i.lost if i.never_recovered or i.answered_with is None else f"with {i.answered_with}"


def metrics(results: Results) -> Table:
    """Every metric of every cell."""
    columns = by_sides(metric_rows.HEAD, metric_rows.SIDES)
    rows = [[row[0], defined(row[1]), *row[2:]] for row in metric_rows.rows(results)]
    notes = [*metric_rows.to_see(results), *metric_rows.absent(results)]
    return table(columns, rows, notes)


def rates(results: Results) -> Table:
    """Survival, false alarms and spares of every cell."""
    columns = by_sides(metric_rows.RATES, metric_rows.RATE_SIDES)
    return table(columns, [list(row) for row in metric_rows.rates(results)])


def _healed(i: Incident) -> str:
    if not i.fired:
        return "never fired"
    return "healed" if i.healed else mark("fail", "not healed")


def phases(results: Results) -> Table:
    """Median seconds of each recovery phase."""
    columns = ["strategy", *(numeric(p, "s") for p in PHASE_NAMES), numeric("n")]
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


def machines(results: Results) -> Table:
    """Every node of the run: its machine, its processes, how it was lost."""
    columns = (
        "node",
        "host",
        "address",
        "devices",
        wide("processes"),
        numeric("clock", "±s"),
        wide("lost"),
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
        "arm",
        numeric("seed"),
        "outcome",
        numeric("steps", "committed"),
        numeric("asked", "steps"),
        numeric("wall clock", "s"),
        numeric("useful", "s"),
        numeric("goodput", "ratio"),
        numeric("unexplained", "s"),
        numeric("step time", "s, median"),
        numeric("provisioned", "ranks"),
        wide("reason"),
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


def wall(spent: Mapping[tuple[str, str], Mapping[str, float]], names: Mapping[str, str]) -> Table:
    """One column for each cell and arm kind, one row for each class, and the sum."""
    columns = ["class", *(numeric(names.get(cell, cell), f"{kind}, s") for cell, kind in spent)]
    classes = [name for name in next(iter(spent.values())) if any(s[name] for s in spent.values())]
    rows = [
        [name, *(number(s[name], finest=WALL_FINEST_S) for s in spent.values())] for name in classes
    ]
    total = [number(sum(s.values()), finest=WALL_FINEST_S) for s in spent.values()]
    return table(columns, [*rows, ["wall clock", *total]])


@dataclass(frozen=True, kw_only=True)
class Block:
    """An arm or incident that can be unfolded. ``verdict``: the group of findings that it is shown
    with; ``facts``: name and text, names of further lines of one kind are empty.
    """

    title: str
    arm: str
    verdict: str
    outcome: Markup
    summary: str
    table: Table
    open: bool
    strip: Markup | str = ""
    facts: tuple[tuple[str, str], ...] = ()


def timelines(found: Sequence[Timeline]) -> list[Block]:
    """Timelines of arms; of many only those that did not end well are open."""
    return [_timeline(one, len(found)) for one in found]


def _timeline(one: Timeline, of: int) -> Block:
    summary = [plural(len(one.incidents), "incident")]
    times = [i.recovery_time for i in one.incidents if i.recovery_time is not None]
    if times:
        summary.append("recovery " + ", ".join(with_unit(t, "s", "lower") for t in times[:4]))
    failed = [name for name, finding in one.arm.invariants.items() if finding.verdict != "pass"]
    if failed:
        summary.append(f"not held: {', '.join(failed[:4])}")
    bad = any(f.verdict == "fail" for f in one.arm.invariants.values())
    broken = bad or one.arm.outcome != "completed"
    verdict = "pass" if one.ended_well else "fail" if broken else "inconclusive"
    said = "; ".join(summary)
    return Block(
        title=one.arm.id,
        arm=one.arm.id,
        verdict=verdict,
        outcome=mark(verdict, one.arm.outcome),
        summary=said,
        strip=strips.of_arm(one, said),
        table=_moments(one),
        open=not one.ended_well or of <= MANY,
    )


def _moments(one: Timeline) -> Table:
    rows: list[list[str]] = []
    struck: float | None = None
    for moment in one.moments:
        if moment.what.startswith("fault injected"):
            struck = moment.time_s
        since = MISSING if struck is None else f"+{moment.time_s - struck:.3f}"
        what = Markup('<span class="m {}"><i></i>{}</span>').format(moment.lane, moment.what)
        rows.append([f"{moment.time_s:.3f}", since, what, moment.who, moment.detail])
    times = [numeric("time", "s"), numeric("since the fault", "s")]
    notes = [f"{plural(one.left_out, 'event')} left out here; all are in trace.json."]
    return table([*times, "event", "who", wide("detail")], rows, notes if one.left_out else ())


def postmortems(found: Sequence[PostMortem]) -> list[Block]:
    """Post-mortems of incidents; open are those that did not end well."""
    return [_postmortem(one) for one in found]


def _postmortem(one: PostMortem) -> Block:
    facts, before = list[tuple[str, str]](), ""
    for label, text in one.facts:
        facts.append(("" if label == before else NAMES.get(label, label), text))
        before = label
    summary = [one.incident.kind]
    if one.account.right is not None:
        summary.append("blamed rightly" if one.account.right else "an innocent was blamed")
    if one.account.rank_s:
        summary.append(with_unit(one.account.rank_s, "rank-s", "lower"))
    verdict = "pass" if one.ended_well else "fail"
    return Block(
        title=one.incident.fault,
        arm=one.account.arm,
        verdict=verdict,
        outcome=mark(verdict, one.incident.outcome),
        summary="; ".join(summary),
        facts=tuple(facts),
        table=table([numeric("since the hit"), wide("event"), "who"], one.moments),
        open=not one.ended_well,
    )


def past_cells(past: History, results: Results) -> list[str]:
    """Ids of the cells that are shown: the first of those with a recovery time in any run."""
    known = {cell for run in past.runs for cell in run.recovery}
    return [cell.id for cell in results.timed if cell.id in known][:MAX_PAST_CELLS]


def earlier_runs(past: History, results: Results) -> Table:
    """One row for each run, the newest first, and the median recovery time of each cell."""
    names, cells = labels(results), past_cells(past, results)
    machines = len({run.host for run in past.runs}) > 1
    columns = [
        "run",
        Column(name="verdict", about="of the whole run, all its cells and clauses"),
        *(numeric(names[cell], "recovery, s, median") for cell in cells),
        *(["machine"] if machines else []),
    ]
    rows = []
    for run in reversed(past.runs):
        name = Markup('<span class="whole">{}</span>').format(run.run_id)
        if run.address:
            name = Markup('<a href="{}">{}</a>').format(run.address, name)
        rows.append(
            [
                stacked(name, f"this run, {run.started}" if run.present else run.started),
                mark(run.verdict if run.verdict in VERDICT_MARKS else "inconclusive", run.title),
                *(_median(run.recovery.get(cell)) for cell in cells),
                *([run.host or MISSING] if machines else []),
            ]
        )
    notes = []
    left = sum(c.id not in cells for c in results.timed)
    if cells and left:
        notes.append(f"{plural(left, 'more cell')} of this run not shown here.")
    if past.beyond:
        notes.append(f"The last {len(past.runs)} runs; older ones were not read.")
    return table(columns, rows, notes)


def _median(metric: Metric | None) -> Cell:
    if metric is None or metric.median is None:
        return stacked(MISSING)
    return stacked(number(metric.median, metric.better) + few(metric), range_of(metric))


def past_plots(past: History, results: Results) -> list[tuple[str, Markup]]:
    """Label and plot of each cell that has a recovery time in more than one run."""
    names = labels(results)
    return [
        (names[cell], strips.of_runs(past.runs, cell, names[cell]))
        for cell in past_cells(past, results)
        if sum(cell in run.recovery for run in past.runs) > 1
    ]
