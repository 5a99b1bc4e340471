"""``metrics.prom``: the run as gauges in the OpenMetrics text format, for scrapers.

Only gauges without time stamps, so that the Prometheus text format (node exporter's textfile
collector) can read it too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
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

    def add(self, value: float, **labels: str) -> None:
        """Add a sample; it replaces an earlier one with the same labels."""
        self.samples[tuple(labels.items())] = value


def render(run: RunDirectory, results: Results) -> Path:
    """Write ``metrics.prom`` atomically, and return its path."""
    path = run.root / "metrics.prom"
    write_whole(path, text_of(families(results)))  # a collector may read it at any moment
    return path


def families(results: Results) -> list[MetricFamily]:
    """All metrics of the file, each sample labelled with the scenario's name, and as simulated
    where nothing was real.
    """
    found = [_run(results), _exit_code(results), _started(results), *_metrics(results)]
    found += [
        _clauses(results),
        _invariants(results),
        _incidents(results),
        _badput(results),
        *_rates(results),
    ]
    if results.simulated:
        for one in found:
            one.samples = {(*k, ("simulated", "true")): v for k, v in one.samples.items()}
    return [one for one in found if one.samples]


def text_of(found: Iterable[MetricFamily]) -> str:
    """The file's text; ``# EOF`` marks it as complete."""
    lines: list[str] = []
    for one in found:
        lines.append(f"# TYPE {one.name} gauge")
        if one.unit:
            lines.append(f"# UNIT {one.name} {one.unit}")
        lines.append(f"# HELP {one.name} {_escape(one.help)}")
        for labels, value in one.samples.items():
            shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels)
            lines.append(f"{one.name}{{{shown}}} {_number(value)}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _run(results: Results) -> MetricFamily:
    family = MetricFamily(
        f"{PREFIX}_run_verdict", "1 for the verdict of the latest run of a scenario"
    )
    for verdict in dict.fromkeys((*VERDICTS, results.verdict)):
        holds = float(verdict == results.verdict)
        family.add(holds, scenario=results.scenario, verdict=verdict)
    return family


def _exit_code(results: Results) -> MetricFamily:
    family = MetricFamily(f"{PREFIX}_run_exit_code", "exit code of the run")
    family.add(results.exit_code, scenario=results.scenario)
    return family


def _started(results: Results) -> MetricFamily:
    name = f"{PREFIX}_run_started_timestamp_seconds"
    family = MetricFamily(name, "when the run began, unix time", "seconds")
    try:
        family.add(datetime.fromisoformat(results.started).timestamp(), scenario=results.scenario)
    except ValueError:
        pass  # a damaged date costs this sample only
    return family


def _metrics(results: Results) -> list[MetricFamily]:
    """One family per metric: smallest, median and largest value of each cell, and the number of
    values.
    """
    found: dict[str, MetricFamily] = {}
    counts = MetricFamily(f"{PREFIX}_metric_values", "how many values a metric has")
    could = MetricFamily(
        f"{PREFIX}_metric_values_possible",
        "incidents or arms that could have given a metric a value",
    )
    for cell in results.cells:
        labels = {"scenario": results.scenario, "cell": cell.id, "strategy": cell.strategy}
        for name, metric in cell.metrics.items():
            counts.add(metric.n, **labels, metric=name)
            if metric.of is not None:
                could.add(metric.of, **labels, metric=name)
            unit = UNITS.get(metric.unit, re.sub(r"\W", "_", metric.unit))
            full = f"{PREFIX}_{name}_{unit}"
            doc = METRICS[name].doc if name in METRICS else name
            family = found.setdefault(full, MetricFamily(full, doc, unit))
            for statistic in ("min", "median", "max", "p95", "p99"):
                value = getattr(metric, statistic)
                if value is not None:
                    family.add(value, **labels, statistic=statistic)
    return [*found.values(), counts, could]


def _clauses(results: Results) -> MetricFamily:
    family = MetricFamily(f"{PREFIX}_sla_verdict", "1 for the verdict of a clause")
    for sla in results.slas:
        for verdict in VERDICTS:
            family.add(
                float(verdict == sla.verdict),
                scenario=results.scenario,
                cell=sla.cell,
                metric=sla.metric,
                clause=sla.clause,
                severity=sla.severity,
                verdict=verdict,
            )
    return family


def _invariants(results: Results) -> MetricFamily:
    family = MetricFamily(f"{PREFIX}_invariant_verdict", "1 for the verdict of an invariant")
    for cell in results.cells:
        for name, finding in cell.invariants.items():
            for verdict in VERDICTS:
                family.add(
                    float(verdict == finding.verdict),
                    scenario=results.scenario,
                    cell=cell.id,
                    invariant=name,
                    verdict=verdict,
                )
    return family


def _incidents(results: Results) -> MetricFamily:
    family = MetricFamily(f"{PREFIX}_incidents", "faults of the run by the job's outcome")
    tally = Counter((i.cell, i.fault, i.kind, i.outcome) for i in results.faults)
    for (cell, fault, kind, outcome), count in tally.items():
        family.add(
            count, scenario=results.scenario, cell=cell, fault=fault, kind=kind, outcome=outcome
        )
    return family


def _rates(results: Results) -> list[MetricFamily]:
    """Survival, false alarms and spares, each with its bounds."""
    by_name = {
        "survival_ratio": MetricFamily(
            f"{PREFIX}_survival_ratio", "share of arms that survived, with its 95 % interval"
        ),
        "alarms": MetricFamily(f"{PREFIX}_false_alarms", "failures detected while no fault acted"),
        "hours": MetricFamily(
            f"{PREFIX}_unfaulted_rank_hours", "rank-hours in which no fault had acted", "hours"
        ),
        "rate": MetricFamily(
            f"{PREFIX}_false_alarm_rate",
            "false alarms per unfaulted rank-hour, with its 95 % upper bound",
        ),
        "idle": MetricFamily(
            f"{PREFIX}_spare_idle_rank_hours", "spares x wall time, all arms", "hours"
        ),
        "memory": MetricFamily(
            f"{PREFIX}_spare_memory_bytes",
            "peak resident memory of a spare that never trained",
            "bytes",
        ),
        "cores": MetricFamily(
            f"{PREFIX}_spare_cores", "processor time per second of a spare that never trained"
        ),
    }
    for cell in results.cells:
        one = cell.reliability
        if one is None:
            continue
        labels = {"scenario": results.scenario, "cell": cell.id, "strategy": cell.strategy}
        bounds = {
            "value": one.survival.probability,
            "low": one.survival.low,
            "high": one.survival.high,
        }
        known = [("survival_ratio", value, {"statistic": name}) for name, value in bounds.items()]
        alarms, spares = one.false_alarms, one.spares
        known += [("alarms", float(alarms.count), {}), ("hours", alarms.rank_hours, {})]
        known += [
            ("rate", alarms.rate if alarms.enough else None, {"statistic": "value"}),
            ("rate", alarms.upper, {"statistic": "high"}),
        ]
        memory = None if spares.memory_mib is None else spares.memory_mib * 2**20
        known += [
            ("idle", spares.idle_rank_hours, {}),
            ("memory", memory, {}),
            ("cores", spares.cores, {}),
        ]
        for name, value, more in known:
            if value is not None:
                by_name[name].add(value, **labels, **more)
    return list(by_name.values())


def _badput(results: Results) -> MetricFamily:
    """Badput by cause, summed over the repeats."""
    family = MetricFamily(
        f"{PREFIX}_badput_seconds", "wall time lost, by cause, summed over repeats", "seconds"
    )
    total: Counter[tuple[str, str, str]] = Counter()
    for arm in results.arms:
        for cause, seconds in arm.badput.items():
            total[arm.cell, arm.arm, cause] += seconds  # type: ignore[assignment]
    for (cell, arm_kind, cause), seconds in total.items():
        family.add(seconds, scenario=results.scenario, cell=cell, arm=arm_kind, cause=cause)
    return family


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escape(text: str) -> str:
    """Escape labels and help as the format requires: backslash, quote and line feed; replace other
    control characters.
    """
    plain = "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)
    return plain.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
