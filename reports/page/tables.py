"""The tables of a run, for its page and its summary; timelines, post-mortems and earlier runs with
what is beside them.
"""

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
    with_unit,
)
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import PHASE_NAMES, Incident
from trainchaos.harness.judge.results import Finding, Results, SlaResult, merge
from trainchaos.reports.content.facts import (
    StrategyFacts,
    incidents_of,
    labels,
    nodes,
    phase_medians,
    strategies,
    target_of,
    where,
)
from trainchaos.reports.content.figures import clause_of, few, range_of
from trainchaos.reports.content.history import History
from trainchaos.reports.content.postmortems import PostMortem
from trainchaos.reports.content.tables import (
    VERDICT_MARKS,
    Cell,
    Column,
    Table,
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
    """Strategies side by side: their benefits and costs. What belongs together stands in one
    column, so that the table is no wider than a page.
    """
    columns = (
        "strategy",
        measured("recovery", "recovery_time", "s, median"),
        measured("full rate", "time_to_full_rate", "s"),
        measured("redundant", "time_to_redundancy", "s"),
        measured("cost", "failure_cost", "rank-hours"),
        measured("lost", "steps_lost", "steps"),
        measured("goodput", "goodput", "ratio"),
        "result, without the fault",
        numeric("provisioned", "ranks", "ranks and spares that were paid for"),
    )
    entries = strategies(results)
    notes = sorted({f"* {e.note}" for e in entries if e.note})
    return table(columns, [_strategy(e) for e in entries], notes, "Strategies")


def _strategy(e: StrategyFacts) -> list[str | Cell]:
    recovery = e.cell.metrics.get("recovery_time")
    values = "" if recovery is None else f"n = {recovery.counted}"
    lost, badput = e.metric("samples_lost"), number(e.badput_s)
    return [
        stacked(e.label, Markup('<span class="under">{}</span>').format(mark(e.cell.verdict))),
        stacked(e.metric("recovery_time", alone=False), range_of(recovery), values),
        *map(e.metric, ("time_to_full_rate", "time_to_redundancy", "failure_cost")),
        stacked(e.metric("steps_lost"), "" if lost == MISSING else f"samples {lost}"),
        stacked(e.metric("goodput"), "" if badput == MISSING else f"badput {badput} s"),
        e.cell.exactness,
        MISSING if e.provisioned is None else f"{e.provisioned}{'*' if e.note else ''}",
    ]


def slas(results: Results, verdict: str) -> Table:
    """Every clause of one verdict with all its points against the limit."""
    columns = (
        "cell",
        "clause",
        "verdict",
        numeric("observed"),
        numeric("n"),
        "every point, limit as a line",
        wide("detail"),
    )
    names, rows = labels(results), []
    better = {(c.id, n): m.better for c in results.cells for n, m in c.metrics.items()}
    for sla in results.slas:
        if sla.verdict != verdict:
            continue
        worse = better.get((sla.cell, sla.metric), "neither")
        clause = Markup("{} <code>{}</code>").format(defined(sla.metric), sla.clause)
        rows.append(
            [
                names.get(sla.cell, sla.cell),
                clause,
                stacked(mark(sla.verdict), "warning only" if sla.severity == "warn" else ""),
                with_unit(sla.observed, sla.unit, worse),
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
        "landed, seen by",
        "detected by",
        measured("recovery", "recovery_time", "s"),
        measured("full rate", "time_to_full_rate", "s"),
        measured("redundant", "time_to_redundancy", "s"),
        measured("lost steps", "steps_lost"),
        "outcome",
        wide("decision"),
    )
    names = labels(results)
    rows = [_fault(names.get(i.cell, i.cell), i, where(results, i)) for i in results.faults]
    return table(columns, rows)


def _fault(cell: str, i: Incident, there: str) -> list[str | Cell]:
    again = f" #{i.occurrence}" if i.occurrence > 0 else ""
    blamed = f"blamed rank {i.blamed_rank}" if i.blamed_rank is not None else ""
    at = f"{'' if i.step is None else f'step {i.step}, '}{number(i.injected_s)} s"
    landed = mark("pass", i.witness or "yes") if i.landed else mark("fail", "did not land")
    detected = number(i.detection_time, "lower", FINEST_S)
    times = (i.recovery_time, i.time_to_full_rate, i.time_to_redundancy)
    healed: Markup | str = "healed" if i.healed else mark("fail", "not healed")
    return [
        stacked(cell, f"repeat {i.repeat}"),
        stacked(Markup('<b class="fault">{}</b>{}').format(i.fault, again), i.kind),
        stacked(target_of(i.target), there, at if i.fired else ""),
        stacked(landed, pairs(i.evidence)),
        stacked(i.detected_by or MISSING, blamed, f"in {detected} s" if i.detected_by else ""),
        *(number(seconds, "lower", FINEST_S) for seconds in times),
        lost_steps(i),
        stacked(i.outcome, healed if i.fired else "never fired"),
        i.decision,
    ]


def lost_steps(i: Incident) -> str:
    """Number of lost steps; ``all`` if the job never recovered; or the fault with which they were
    counted.
    """
    return i.lost if i.never_recovered or i.answered_with is None else f"with {i.answered_with}"


def phases(results: Results) -> Table:
    """Median seconds of each recovery phase."""
    columns = ["strategy", *(numeric(p, "s") for p in PHASE_NAMES), numeric("n")]
    names, rows = labels(results), []
    for cell in results.cells:
        mine = incidents_of(results, cell.id)
        medians = phase_medians(mine)
        if medians:
            cells = [number(medians.get(name), finest=FINEST_S) for name in PHASE_NAMES]
            n = counted(sum(bool(i.phases) for i in mine), len(mine))
            rows.append([names[cell.id], *cells, n])
    return table(columns, rows)


def machines(results: Results) -> Table:
    """Every node of the run: its machine, its processes, how it was lost."""
    columns = (
        *("node", "host", "address", "devices", wide("processes")),
        numeric("clock", "±ms"),
        wide("lost"),
    )
    rows = [
        (
            *(str(n.number), n.host, n.address, n.devices, n.processes),
            number(n.clock_bound_s * 1e3) if n.clock_bound_s else MISSING,
            "; ".join(n.lost),
        )
        for n in nodes(results)
    ]
    return table(columns, rows)


def arms(results: Results) -> Table:
    """Every run of training, faulted and control."""
    columns = (
        "arm",
        numeric("seed"),
        "outcome",
        numeric("steps", "of those asked"),
        numeric("wall clock", "s"),
        numeric("useful", "s"),
        numeric("goodput", "ratio"),
        numeric("unexplained", "s"),
        numeric("step time", "s, median"),
        numeric("provisioned", "ranks"),
        wide("reason"),
    )
    rows = [
        (
            a.id,
            str(a.seed),
            a.outcome,
            f"{a.committed_step} of {a.steps}",
            number(a.wall_s),
            number(a.useful_s),
            number(a.goodput, "higher"),
            number(a.residual_s),
            number(a.step_time_median),
            str(a.provisioned_ranks),
            a.reason,
        )
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
        known = [(called[c.id], c.invariants.get(name)) for c in results.cells]
        present = tuple((cell, finding) for cell, finding in known if finding is not None)
        arms = [(a.id, a.invariants[name]) for a in results.arms if name in a.invariants]
        arms.sort(key=lambda one: one[1].verdict == "pass")
        rows.append(
            InvariantRow(
                name=name,
                cells=tuple(Markup(MISSING) if f is None else mark(f.verdict) for _, f in known),
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
    columns_of = list(spent.values())
    classes = [name for name in columns_of[0] if any(one[name] for one in columns_of)]
    rows = [
        [name, *(number(s[name], finest=WALL_FINEST_S) for s in columns_of)] for name in classes
    ]
    total = [number(sum(s.values()), finest=WALL_FINEST_S) for s in columns_of]
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


def timelines(lived: Sequence[Timeline]) -> list[Block]:
    """Timelines of arms; of many only those that did not end well are open."""
    return [_timeline(one, len(lived)) for one in lived]


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


def postmortem(one: PostMortem) -> Block:
    """An incident; open if it did not end well."""
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
    hosts = len({run.host for run in past.runs}) > 1
    columns = [
        "run",
        Column(name="verdict", about="of the whole run, all its cells and clauses"),
        *(numeric(names[cell], "recovery, s, median") for cell in cells),
        *(["machine"] if hosts else []),
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
                *([run.host or MISSING] if hosts else []),
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
