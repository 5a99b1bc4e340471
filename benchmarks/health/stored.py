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

from benchmarks.harness import markdown
from trainchaos.chaos.events.log import Kind, Log, read_log
from trainchaos.recovery.health.detectors.base import Alarm, Detector
from trainchaos.recovery.health.detectors.digest import DigestDetector
from trainchaos.recovery.health.detectors.gradient import gradient_spike
from trainchaos.recovery.health.detectors.hang import HangDetector
from trainchaos.recovery.health.detectors.loss import loss_spike
from trainchaos.recovery.health.detectors.straggler import StragglerDetector
from trainchaos.recovery.health.detectors.throughput import ThroughputDetector
from trainchaos.recovery.health.readings.reading import Reading
from trainchaos.recovery.health.sources.job import JobSource

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
    job = JobSource()
    due_s = min((event.time_ns for event in log.events), default=0) / NS + POLL_S
    for event in log.events:
        time_s = event.time_ns / NS
        while time_s > due_s:
            yield job.read(due_s), due_s
            due_s += POLL_S
        if event.kind is Kind.STEP_COMMITTED and event.step is not None:
            job.committed(event.data, event.step, time_s)
        elif event.kind is Kind.STEP_REPORTED and event.step is not None:
            # A beacon tells the loss of the rank's own samples, and its step.
            job.committed({"seconds": {}, **event.data}, event.step, time_s)
        elif event.kind is Kind.STATE_DIGEST:
            text = f"{event.data['parameters']} {event.data['optimizer']}"
            job.feed(event.data["rank"], "digest", 0.0, "hex", time_s, event.step, text)
    yield job.read(due_s), due_s


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
