"""Rows of text shared by all reports: every metric of every cell, and the rates over its arms."""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.scenario.sla import samples_needed
from trainchaos.chaos.stats import LEAST_OF_MEDIAN
from trainchaos.chaos.units import MISSING, counted, enclosing, interval, number, percent, quantity
from trainchaos.harness.judge.checkers.job.observed import LOSSES
from trainchaos.harness.judge.checkers.job.values import NOT_RESTORED
from trainchaos.harness.judge.evidence.evidence import WARNING
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.samples import per_arm
from trainchaos.harness.judge.results import CellResult, Results, Spares, Survival
from trainchaos.reports.content.facts import labels
from trainchaos.reports.content.figures import alarms, median_of, survived

HEAD = (
    "strategy",
    "metric",
    "unit",
    "median",
    "min",
    "max",
    "95 % interval",
    "p95",
    "p99",
    "values",
    "arms",
)
SIDES = "lllrrrlrrrr"
RATES = (
    "strategy",
    "survived",
    "survival, 95 % interval",
    "false alarms",
    "unfaulted rank-hours",
    "false alarms per rank-hour",
    "spares",
    "idle rank-hours",
    "share",
    "memory of one (MiB)",
    "cores of one",
)
RATE_SIDES = "lrlrrlrrrrr"


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """A row for each metric that has values."""
    names = labels(results)
    for cell in results.cells:
        for name, metric in cell.metrics.items():
            if metric.values:
                yield (names[cell.id], name, *_row(metric))


def absent(results: Results) -> list[str]:
    """Why metrics have no value, and which invariants a command is not judged by; cells with the
    same reason share a line.
    """
    found = [
        f"{name} is absent: {why}" for cell in results.cells for name, why in cell.absent.items()
    ]
    for cell in results.cells:
        told = {name: why for name, why in cell.unjudged.items() if name != LOSSES}
        if told:
            listed = ", ".join(f"{name} ({why})" for name, why in told.items())
            found.append(
                f"not judged, as the command does not tell: {listed}; a workload of kind script"
                " does"
            )
    names = labels(results) if len(results.cells) > 1 else {}
    found += [
        f"{LOSSES} is not judged{f' in {names[cell.id]}' if names else ''}: {cell.unjudged[LOSSES]}"
        for cell in results.cells
        if LOSSES in cell.unjudged and NOT_RESTORED not in cell.unjudged[LOSSES]
    ]
    return list(dict.fromkeys(found))


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


def _row(metric: Metric) -> tuple[str, ...]:
    arms = len(per_arm(metric.values, metric.arms))
    return (
        metric.unit,
        quantity(metric.median, metric.unit, metric.better),
        *enclosing(metric.min, metric.max, metric.unit),
        interval(metric.ci95) or f"needs {LEAST_OF_MEDIAN} repeats",
        _quantile(metric, "p95"),
        _quantile(metric, "p99"),
        metric.counted,
        counted(arms, metric.of_arms),
    )


def _quantile(metric: Metric, name: str) -> str:
    value = metric.p95 if name == "p95" else metric.p99
    if value is None:
        return f"needs {samples_needed(name)} repeats"
    return quantity(value, metric.unit, metric.better)


def rates(results: Results) -> Iterator[tuple[str, ...]]:
    """A row for each cell that has rates."""
    names = labels(results)
    for cell in results.cells:
        if cell.reliability is not None:
            reliability = cell.reliability
            yield (
                names[cell.id],
                *_survival(reliability.survival),
                *alarms(reliability.false_alarms),
                *_spares(reliability.spares),
            )


def _survival(one: Survival) -> tuple[str, str]:
    if one.probability is None:
        return MISSING, "no arm in which every fault landed"
    kept, between = survived(one).split(": ", 1)
    return kept, between


def _spares(one: Spares) -> tuple[str, ...]:
    if not one.provisioned:
        return "0", "0", "0 %", MISSING, MISSING
    memory = MISSING if one.memory_mib is None else f"{one.memory_mib:.0f}"
    cores = MISSING if one.cores is None else number(one.cores, "lower")
    return (
        str(one.provisioned),
        number(one.idle_rank_hours, "lower"),
        percent(one.share),
        memory,
        cores,
    )


def _few(cell: CellResult) -> list[str]:
    """Metrics of a cell that a terminal shows beside its table."""
    parts = []
    for name, words in (
        ("ettr", "ETTR {}"),
        ("mfu", "MFU {}"),
        ("failure_cost", "a failure costs {}"),
    ):
        metric = cell.metrics.get(name)
        if metric is not None and metric.values:
            parts.append(words.format(median_of(metric, unit=True)))
    recovery = cell.metrics.get("recovery_time")
    if recovery is not None and recovery.values:
        quantiles = ", ".join(f"{name} {_quantile(recovery, name)}" for name in ("p95", "p99"))
        parts.append(f"recovery {quantiles}")
    return parts


def short(results: Results) -> list[str]:
    """One line per cell for a terminal: survival, false alarms, idle spares."""
    names = labels(results)
    measured = {names[cell.id]: _few(cell) for cell in results.cells}
    lines = []
    for name, kept, between, suspected, hours, rate, spares, *rest in rates(results):
        parts = [
            f"survived {kept}, {between}",
            f"false alarms {suspected} in {hours} unfaulted rank-hours (per hour: {rate})",
        ]
        if spares != "0":
            _, share, memory, cores = rest
            many = "spare" if spares == "1" else "spares"
            parts.append(
                f"{spares} {many}: {share} of the rank time, {memory} MiB and {cores} cores each"
            )
        lines.append(f"  {name}  " + "; ".join([*parts, *measured.get(name, ())]))
    return [*lines, *(f"  {line}" for line in absent(results))]
