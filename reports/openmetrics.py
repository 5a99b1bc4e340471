"""``metrics.prom``: the run as gauges in the OpenMetrics text format, for scrapers.

Only gauges without time stamps, so that the Prometheus text format (node exporter's textfile
collector) can read it too.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from trainchaos.chaos.files import write_whole
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.measure.measure import METRICS
from trainchaos.harness.judge.results import Results

PREFIX = "trainchaos"
VERDICTS = ("pass", "fail", "inconclusive")
UNITS: Mapping[str, str] = {"s": "seconds", "ms": "milliseconds", "samples/s": "samples_per_second"}
"""Units with a name in the format, or with characters it does not allow -> their names; other units
are used as they are.
"""


@dataclass
class MetricFamily:
    """A metric and its samples: labels -> value. ``unit``: the last word of its name, or empty."""

    name: str
    help: str
    unit: str = ""
    samples: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def add(self, value: float | None, **labels: str) -> None:
        """Add a sample, if there is a value; it replaces an earlier one with the same labels."""
        if value is not None:
            self.samples[tuple(labels.items())] = value

    def add_verdict(self, verdict: str, **labels: str) -> None:
        """A sample for each verdict: 1 for the given one."""
        for one in dict.fromkeys((*VERDICTS, verdict)):
            self.add(float(one == verdict), **labels, verdict=one)


def render(run: RunDirectory, results: Results) -> Path:
    """Write ``metrics.prom`` atomically, and return its path."""
    path = run.root / "metrics.prom"
    write_whole(path, text_of(families(results)))  # a collector may read it at any moment
    return path


def families(results: Results) -> list[MetricFamily]:
    """All metrics of the file, each sample labelled with the scenario's name, and as simulated
    where nothing was real.
    """
    made = [
        *_of_the_run(results),
        *_metrics(results),
        *_judged(results),
        _badput(results),
        *_rates(results),
    ]
    more = (("simulated", "true"),) if results.simulated else ()
    for one in made:
        one.samples = {
            (("scenario", results.scenario), *labels, *more): value
            for labels, value in one.samples.items()
        }
    return [one for one in made if one.samples]


def text_of(made: Iterable[MetricFamily]) -> str:
    """The file's text; ``# EOF`` marks it as complete."""
    lines: list[str] = []
    for one in made:
        lines.append(f"# TYPE {one.name} gauge")
        if one.unit:
            lines.append(f"# UNIT {one.name} {one.unit}")
        lines.append(f"# HELP {one.name} {_escape(one.help)}")
        for labels, value in one.samples.items():
            shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels)
            lines.append(f"{one.name}{{{shown}}} {_number(value)}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _family(name: str, about: str, unit: str = "") -> MetricFamily:
    return MetricFamily(f"{PREFIX}_{name}", about, unit)


def _of_the_run(results: Results) -> list[MetricFamily]:
    verdict = _family("run_verdict", "1 for the verdict of the latest run of a scenario")
    verdict.add_verdict(results.verdict)
    code = _family("run_exit_code", "exit code of the run")
    code.add(results.exit_code)
    began = _family("run_started_timestamp_seconds", "when the run began, unix time", "seconds")
    with suppress(ValueError):  # a damaged date costs this sample only
        began.add(datetime.fromisoformat(results.started).timestamp())
    return [verdict, code, began]


def _metrics(results: Results) -> list[MetricFamily]:
    """One family per metric: smallest, median and largest value of each cell, and the number of
    values.
    """
    made: dict[str, MetricFamily] = {}
    counts = _family("metric_values", "how many values a metric has")
    could = _family(
        "metric_values_possible", "incidents or arms that could have given a metric a value"
    )
    for cell in results.cells:
        labels = {"cell": cell.id, "strategy": cell.strategy}
        for name, metric in cell.metrics.items():
            counts.add(metric.n, **labels, metric=name)
            could.add(metric.of, **labels, metric=name)
            unit = UNITS.get(metric.unit, re.sub(r"\W", "_", metric.unit))
            doc = METRICS[name].doc if name in METRICS else name
            family = made.setdefault(f"{name}_{unit}", _family(f"{name}_{unit}", doc, unit))
            for statistic in ("min", "median", "max", "p95", "p99"):
                family.add(getattr(metric, statistic), **labels, statistic=statistic)
    return [*made.values(), counts, could]


def _judged(results: Results) -> list[MetricFamily]:
    """Clauses, invariants and incidents."""
    clauses = _family("sla_verdict", "1 for the verdict of a clause")
    for sla in results.slas:
        about = {"cell": sla.cell, "metric": sla.metric, "clause": sla.clause}
        clauses.add_verdict(sla.verdict, **about, severity=sla.severity)
    invariants = _family("invariant_verdict", "1 for the verdict of an invariant")
    for cell in results.cells:
        for name, finding in cell.invariants.items():
            invariants.add_verdict(finding.verdict, cell=cell.id, invariant=name)
    incidents = _family("incidents", "faults of the run by the job's outcome")
    tally = Counter((i.cell, i.fault, i.kind, i.outcome) for i in results.faults)
    for (cell_id, fault, kind, outcome), count in tally.items():
        incidents.add(count, cell=cell_id, fault=fault, kind=kind, outcome=outcome)
    return [clauses, invariants, incidents]


def _rates(results: Results) -> list[MetricFamily]:
    """Survival, false alarms and spares, each with its bounds."""
    made = [
        _family("survival_ratio", "share of arms that survived, with its 95 % interval"),
        _family("false_alarms", "failures detected while no fault acted"),
        _family("unfaulted_rank_hours", "rank-hours in which no fault had acted", "hours"),
        _family(
            "false_alarm_rate", "false alarms per unfaulted rank-hour, with its 95 % upper bound"
        ),
        _family("spare_idle_rank_hours", "spares x wall time, all arms", "hours"),
        _family(
            "spare_memory_bytes", "peak resident memory of a spare that never trained", "bytes"
        ),
        _family("spare_cores", "processor time per second of a spare that never trained"),
    ]
    survival, count, hours, rate, idle, memory, cores = made
    for cell in results.cells:
        if cell.reliability is None:
            continue
        labels = {"cell": cell.id, "strategy": cell.strategy}
        kept, alarms = cell.reliability.survival, cell.reliability.false_alarms
        spares = cell.reliability.spares
        for name, value in (("value", kept.probability), ("low", kept.low), ("high", kept.high)):
            survival.add(value, **labels, statistic=name)
        count.add(float(alarms.count), **labels)
        hours.add(alarms.rank_hours, **labels)
        rate.add(alarms.rate if alarms.enough else None, **labels, statistic="value")
        rate.add(alarms.upper, **labels, statistic="high")
        idle.add(spares.idle_rank_hours, **labels)
        memory.add(None if spares.memory_mib is None else spares.memory_mib * 2**20, **labels)
        cores.add(spares.cores, **labels)
    return made


def _badput(results: Results) -> MetricFamily:
    """Badput by cause, summed over the repeats."""
    family = _family("badput_seconds", "wall time lost, by cause, summed over repeats", "seconds")
    total: dict[tuple[str, str, str], float] = defaultdict(float)
    for arm in results.arms:
        for cause, seconds in arm.badput.items():
            total[arm.cell, arm.arm, cause] += seconds
    for (cell, kind, cause), seconds in total.items():
        family.add(seconds, cell=cell, arm=kind, cause=cause)
    return family


def _number(value: float) -> str:
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    if value != value:
        return "NaN"
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escape(text: str) -> str:
    """Escape labels and help as the format requires: backslash, quote and line feed; replace other
    control characters.
    """
    plain = "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
