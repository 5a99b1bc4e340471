"""Metrics, rates and clauses of a run as text, rounded as in ``chaos.units``, and the tables of
every metric of every cell and of the rates over its arms.
"""

from __future__ import annotations

from trainchaos.chaos.scenario.sla import Clause, ClauseError, parse_clause, samples_needed
from trainchaos.chaos.stats import LEAST_OF_MEDIAN
from trainchaos.chaos.units import (
    MISSING,
    counted,
    enclosing,
    interval,
    number,
    percent,
    quantity,
    with_unit,
)
from trainchaos.harness.judge.checkers.job.observed import LOSSES
from trainchaos.harness.judge.checkers.job.values import NOT_RESTORED
from trainchaos.harness.judge.evidence.evidence import WARNING
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.samples import per_arm
from trainchaos.harness.judge.results import (
    LEAST_RANK_HOURS,
    CellResult,
    FalseAlarms,
    Reliability,
    Results,
    SlaResult,
    Survival,
)
from trainchaos.reports.content.tables import Table, defined, numeric, table

SHORT = {"ettr": "ETTR {}", "mfu": "MFU {}", "failure_cost": "a failure costs {}"}
"""Metrics that a terminal shows beside its table."""


def labels(results: Results) -> dict[str, str]:
    """Cell id -> unique label of the cell (``harness.judge.measure.labels``)."""
    return {cell.id: cell.label or cell.id for cell in results.cells}


def median_of(metric: Metric | None, *, unit: bool = False, alone: bool = True) -> str:
    """The median of a metric, rounded against us; ``unit``: with its unit. With ``alone`` (no
    column beside it shows the count), it says how many values it has if some are missing.
    """
    if metric is None or metric.median is None:
        return MISSING
    text = with_unit if unit else quantity
    return text(metric.median, metric.unit, metric.better) + (few(metric) if alone else "")


def few(metric: Metric | None) -> str:
    """`` (2 of 3)`` if an incident or arm gave no value; else empty."""
    return "" if metric is None or metric.counted == str(metric.n) else f" ({metric.counted})"


def range_of(metric: Metric | None) -> str:
    """``[min, max]`` of a metric; empty with fewer than two values."""
    if metric is None or metric.n < 2:
        return ""
    return interval((metric.min, metric.max), metric.unit)


def survived(one: Survival | None) -> str:
    """``3 of 4: 75.0 % [19.4 %, 99.4 %]``; empty without data."""
    if one is None or one.probability is None:
        return ""
    between = "[{} %, {} %]".format(*enclosing(one.low * 100, one.high * 100))
    return f"{one.survived} of {one.arms}: {percent(one.probability)} {between}"


def alarms(one: FalseAlarms) -> tuple[str, str, str]:
    """Number of false alarms, rank-hours, and rate per rank-hour; with few hours only its upper
    bound.
    """
    if one.rate is None:
        return MISSING, MISSING, "no unfaulted time"
    rate = number(one.rate) if one.enough else f"too few hours ({LEAST_RANK_HOURS:g} needed)"
    bound = f"{rate}, below {number(one.upper, 'lower')} with 95 %"
    return str(one.count), number(one.rank_hours, "higher"), bound


def clause_of(sla: SlaResult) -> Clause | None:
    """The limit of a clause in the metric's unit; None for a form of which a report shows only the
    text.
    """
    try:
        return parse_clause(sla.clause, sla.unit)
    except ClauseError:
        return None


def metrics(results: Results) -> Table:
    """Every metric of every cell that has values."""
    columns = (
        *("strategy", "metric", "unit"),
        *map(numeric, ("median", "min", "max")),
        "95 % interval",
        *map(numeric, ("p95", "p99", "values", "arms")),
    )
    names = labels(results)
    rows = [
        (
            names[cell.id],
            defined(name),
            metric.unit,
            quantity(metric.median, metric.unit, metric.better),
            *enclosing(metric.min, metric.max, metric.unit),
            interval(metric.ci95) or f"needs {LEAST_OF_MEDIAN} repeats",
            _quantile(metric, "p95"),
            _quantile(metric, "p99"),
            metric.counted,
            counted(len(per_arm(metric.values, metric.arms)), metric.of_arms),
        )
        for cell in results.cells
        for name, metric in cell.metrics.items()
        if metric.values
    ]
    return table(columns, rows, absent(results))


def _quantile(metric: Metric, name: str) -> str:
    value = metric.p95 if name == "p95" else metric.p99
    if value is None:
        return f"needs {samples_needed(name)} repeats"
    return quantity(value, metric.unit, metric.better)


def rates(results: Results) -> Table:
    """Survival, false alarms and spares of each cell that has them."""
    columns = (
        "strategy",
        "survived, 95 % interval",
        numeric("false alarms"),
        numeric("unfaulted rank-hours"),
        "false alarms per rank-hour",
        numeric("spares"),
        numeric("idle rank-hours"),
        numeric("share"),
        numeric("memory of one (MiB)"),
        numeric("cores of one"),
    )
    names = labels(results)
    rows = [
        (
            names[cell.id],
            survived(cell.reliability.survival) or "no arm in which every fault landed",
            *alarms(cell.reliability.false_alarms),
            *_spares(cell.reliability),
        )
        for cell in results.cells
        if cell.reliability is not None
    ]
    return table(columns, rows)


def _spares(of: Reliability) -> tuple[str, ...]:
    """Number, idle hours, share, memory and cores."""
    one = of.spares
    if not one.provisioned:
        return "0", "0", "0 %", MISSING, MISSING
    memory = MISSING if one.memory_mib is None else f"{one.memory_mib:.0f}"
    idle, cores = number(one.idle_rank_hours, "lower"), number(one.cores, "lower")
    return str(one.provisioned), idle, percent(one.share), memory, cores


def absent(results: Results) -> list[str]:
    """Why metrics have no value, and which invariants a command is not judged by; cells with the
    same reason share a line.
    """
    lines = [f"{name} is absent: {why}" for c in results.cells for name, why in c.absent.items()]
    names = labels(results) if len(results.cells) > 1 else {}
    for cell in results.cells:
        told = {name: why for name, why in cell.unjudged.items() if name != LOSSES}
        if told:
            listed = ", ".join(f"{name} ({why})" for name, why in told.items())
            lines.append(
                f"not judged, as the command does not tell: {listed}; a workload of kind script"
                " does"
            )
    for cell in results.cells:
        why = cell.unjudged.get(LOSSES, NOT_RESTORED)
        where = f" in {names[cell.id]}" if names else ""
        lines += [] if NOT_RESTORED in why else [f"{LOSSES} is not judged{where}: {why}"]
    return list(dict.fromkeys(lines))


def to_see(results: Results) -> list[str]:
    """What people have to see though it fails nothing: warnings of invariants that hold, and of
    commands that are not judged by their losses, that these show a state not restored.
    """
    names = labels(results)
    warned = [
        f"{name}  {one.witness}"
        for cell in results.cells
        for name, one in cell.invariants.items()
        if one.verdict == "pass" and WARNING in one.witness
    ]
    return warned + [
        f"{LOSSES} is not judged, but see {names[cell.id]}: {cell.unjudged[LOSSES]}"
        for cell in results.cells
        if NOT_RESTORED in cell.unjudged.get(LOSSES, "")
    ]


def short(results: Results) -> list[str]:
    """One line per cell for a terminal: survival, false alarms, idle spares."""
    names = labels(results)
    lines = [f"  {names[cell.id]}  {_short(cell)}" for cell in results.cells if cell.reliability]
    return [*lines, *(f"  {line}" for line in absent(results))]


def _short(cell: CellResult) -> str:
    rates = cell.reliability
    if rates is None:
        return ""
    kept, _, between = survived(rates.survival).partition(": ")
    count, hours, rate = alarms(rates.false_alarms)
    parts = [
        f"survived {kept}, {between}" if kept else "no arm in which every fault landed",
        f"false alarms {count} in {hours} unfaulted rank-hours (per hour: {rate})",
    ]
    spares, _, share, memory, cores = _spares(rates)
    if spares != "0":
        many = "spare" if spares == "1" else "spares"
        parts.append(
            f"{spares} {many}: {share} of the rank time, {memory} MiB and {cores} cores each"
        )
    for name, words in SHORT.items():
        metric = cell.metrics.get(name)
        if metric is not None and metric.values:
            parts.append(words.format(median_of(metric, unit=True)))
    recovery = cell.metrics.get("recovery_time")
    if recovery is not None and recovery.values:
        quantiles = ", ".join(f"{name} {_quantile(recovery, name)}" for name in ("p95", "p99"))
        parts.append(f"recovery {quantiles}")
    return "; ".join(parts)
