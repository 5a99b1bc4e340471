"""Detectors on logs of real runs: what they say of jobs to which nothing was done, and of jobs in
which a rank hung.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import markdown
from trainchaos.chaos.events.log import Kind, Log, read_log
from trainchaos.recovery.health.detector import Alarm, Detector
from trainchaos.recovery.health.job_detectors import (
    DigestDetector,
    HangDetector,
    StragglerDetector,
    ThroughputDetector,
    gradient_spike,
    loss_spike,
)
from trainchaos.recovery.health.readings import Place, Reading

NS = 1e9
POLL_S = 0.1
DETECTORS = (
    StragglerDetector,
    gradient_spike,
    loss_spike,
    ThroughputDetector,
    DigestDetector,
    HangDetector,
)


@dataclass(kw_only=True)
class Played:
    """Of several runs: ``alarms`` of each detector, the time of all series of ranks, faults, and
    how long after some of them a hang was alarmed of.
    """

    runs: int = 0
    hours: float = 0.0
    alarms: Counter[str] = field(default_factory=Counter)
    hangs_s: list[float] = field(default_factory=list)
    hung: int = 0


def readings_of(log: Log) -> Iterator[tuple[Sequence[Reading], float]]:
    """What ranks said, in polls of 0.1 s, by the time of the log."""
    held: list[Reading] = []
    last: dict[Place, tuple[int, float]] = {}
    due_s = min((event.time_ns for event in log.events), default=0) / NS + POLL_S
    for event in log.events:
        time_s, step, data = event.time_ns / NS, event.step, event.data
        while time_s > due_s:
            yield held, due_s
            held, due_s = [], due_s + POLL_S
        if step is None or type(data.get("rank")) is not int:
            continue
        where = Place(data["rank"])
        if event.kind is Kind.STATE_DIGEST:
            text = f"{data['parameters']} {data['optimizer']}"
            held.append(Reading(where, "digest", 0.0, "hex", time_s, step, text))
        elif event.kind in (Kind.STEP_COMMITTED, Kind.STEP_REPORTED):
            before, last[where] = last.get(where), (step, time_s)
            for metric, value in _values(data, step, time_s, before):
                held.append(Reading(where, metric, value, "", time_s, step))
    yield held, due_s


def _values(
    data: Mapping[str, Any], step: int, time_s: float, before: tuple[int, float] | None
) -> Iterator[tuple[str, float]]:
    """Metrics of a step, of those that are there: a beacon tells the loss of the rank's own
    samples, and its step.
    """
    yield "committed", float(step)
    took = data.get("seconds", {})
    if own := [took[phase] for phase in ("forward", "backward", "optimizer") if phase in took]:
        yield "compute", float(sum(own))
    for metric, key in (("loss", "loss"), ("gradient_norm", "grad_norm")):
        if isinstance(data.get(key), int | float):
            yield metric, float(data[key])
    if before is not None and step == before[0] + 1 and time_s > before[1] and "samples" in data:
        yield "throughput", data["samples"] / (time_s - before[1])


def alarms_of(log: Log) -> dict[str, list[tuple[Alarm, float]]]:
    """Detector -> its alarms, and when each was raised; until the job's last step: nobody waits
    for one that is done.
    """
    detectors: list[Detector] = [make() for make in DETECTORS]
    found: dict[str, list[tuple[Alarm, float]]] = {one.what: [] for one in detectors}
    steps = [event.time_ns for event in log.of(Kind.STEP_COMMITTED, Kind.STEP_REPORTED)]
    last_s = max(steps, default=0) / NS
    for readings, now_s in readings_of(log):
        if now_s > last_s:
            break
        for one in detectors:
            found[one.what] += [(alarm, now_s) for alarm in one.look(readings, now_s)]
    return found


def played(archives: Sequence[Path]) -> Mapping[str, Played]:
    """Family of faults -> what was found in its runs, of several archives of comparisons."""
    families: dict[str, Played] = defaultdict(Played)
    for archive in archives:
        with tempfile.TemporaryDirectory() as directory:
            with tarfile.open(archive) as packed:
                packed.extractall(directory, filter="data")
            for path in sorted(Path(directory).rglob("*.faulted/orchestrator.jsonl")):
                family = path.relative_to(directory).parts[1].partition(".")[2]
                family = "control" if family.startswith("control") else family
                _add(read_log(path.parent), families[family])
    return families


def _add(log: Log, to: Played) -> None:
    reports = log.of(Kind.STEP_REPORTED)
    steps = [event.time_ns for event in reports]
    if not steps:
        return
    to.runs += 1
    ranks = len({event.data["rank"] for event in reports})
    to.hours += ranks * (max(steps) - min(steps)) / NS / 3600
    found = alarms_of(log)
    to.alarms.update({what: len(alarms) for what, alarms in found.items()})
    for event in log.of(Kind.FAULT_INJECTED):
        began_s = event.time_ns / NS
        to.hung += 1
        after = [now_s - began_s for _, now_s in found["hang"] if now_s >= began_s]
        to.hangs_s += [min(after)] if after else []


def table(found: Mapping[str, Played]) -> str:
    """A row for each family, as Markdown."""
    head = ["runs with", "n", "rank-hours", "faults with a hang alarm", "after, s: median"]
    rows = []
    for family, of in sorted(found.items()):
        cells = [family, of.runs, f"{of.hours:.2f}", f"{len(of.hangs_s)} of {of.hung}"]
        cells.append(f"{median(of.hangs_s):.2f}" if of.hangs_s else "-")
        rows.append([*cells, of.alarms["loss-spike"], of.alarms["hang"]])
    return markdown([*head, "loss-spike", "hang, all"], rows)
