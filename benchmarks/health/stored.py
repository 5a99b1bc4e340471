"""Detectors on logs of real runs: what they say of jobs to which nothing was done, and of jobs in
which a rank hung.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

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
    """Of several runs: ``alarms`` of each detector, and the time of all series of ranks."""

    runs: int = 0
    hours: float = 0.0
    alarms: dict[str, int] = field(default_factory=dict)
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


def play(root: Path) -> Mapping[str, Played]:
    """Family of faults -> what was found in its runs, of an unpacked archive of a comparison."""
    families: dict[str, Played] = {}
    for path in sorted(root.rglob("*.faulted/orchestrator.jsonl")):
        log = read_log(path.parent)
        family = path.relative_to(root).parts[1].partition(".")[2]
        family = "control" if family.startswith("control") else family
        played = families.setdefault(family, Played())
        steps = [event.time_ns for event in log.of(Kind.STEP_REPORTED)]
        if not steps:
            continue
        ranks = len({event.data["rank"] for event in log.of(Kind.STEP_REPORTED)})
        played.runs += 1
        played.hours += ranks * (max(steps) - min(steps)) / NS / 3600
        found = alarms_of(log)
        for what, alarms in found.items():
            played.alarms[what] = played.alarms.get(what, 0) + len(alarms)
        _hangs(log, found["hang"], played)
    return families


def _hangs(log: Log, alarms: Sequence[tuple[Alarm, float]], played: Played) -> None:
    for event in log.of(Kind.FAULT_INJECTED):
        began_s = event.time_ns / NS
        played.hung += 1
        after = [now_s - began_s for _, now_s in alarms if now_s >= began_s]
        if after:
            played.hangs_s.append(min(after))


def unpacked(archives: Sequence[Path]) -> Mapping[str, Played]:
    """Of several archives together."""
    total: dict[str, Played] = {}
    for archive in archives:
        with tempfile.TemporaryDirectory() as directory:
            with tarfile.open(archive) as packed:
                packed.extractall(directory, filter="data")
            for family, one in play(Path(directory)).items():
                all_of = total.setdefault(family, Played())
                all_of.runs += one.runs
                all_of.hours += one.hours
                all_of.hung += one.hung
                all_of.hangs_s += one.hangs_s
                for what, count in one.alarms.items():
                    all_of.alarms[what] = all_of.alarms.get(what, 0) + count
    return total


def table(found: Mapping[str, Played]) -> str:
    """A row for each family, as Markdown."""
    head = ["runs with", "n", "rank-hours", "faults with a hang alarm", "after, s: median"]
    head += ["loss-spike", "hang, all"]
    rows = [head, ["---"] * len(head)]
    for family, one in sorted(found.items()):
        rows.append(
            [
                family,
                str(one.runs),
                f"{one.hours:.2f}",
                f"{len(one.hangs_s)} of {one.hung}",
                f"{median(one.hangs_s):.2f}" if one.hangs_s else "-",
                *(str(one.alarms.get(w, 0)) for w in ("loss-spike", "hang")),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
