"""Reads series over time and step from the event logs of an arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.log import Event, Kind, Log, read_log
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import arms_of, median_incident, struck

MAX_POINTS = 1500


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A committed step, once for all ranks; ``time_s``: since the start of the arm."""

    time_s: float
    step: int
    samples: int
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class ArmSeries:
    """Commits of one arm, by time. ``observed``: the steps of a command, as far as it reported
    them; ``healed``: (fault, occurrence) -> the second it was healed.
    """

    arm: ArmResult
    observed: bool
    steps: Sequence[Commit]
    healed: dict[tuple[str, int], float]

    def throughput(self) -> list[tuple[float, float]]:
        """(second, samples/s) between commits of *new* steps; redone steps do not count. Steps with
        the same time, such as lines of a command read together, count as one. Without the first
        interval, which would count start-up as a slow step.
        """
        new: dict[float, int] = {}
        high = 0
        for one in self.steps:
            if one.step > high:
                high, new[one.time_s] = one.step, new.get(one.time_s, 0) + one.samples
        times, size = list(new), max(1, -(-len(new) // MAX_POINTS))
        groups = [times[at : at + size] for at in range(0, len(times), size)]
        rates, before = [], None
        for group in groups:
            if before is not None:
                rates.append((group[-1], sum(map(new.__getitem__, group)) / (group[-1] - before)))
            before = group[-1]
        return rates

    @property
    def rate_unit(self) -> str:
        """Unit of ``throughput``; a command may not report samples."""
        alone = self.observed and all(one.samples == 1 for one in self.steps)
        return "steps/s" if alone else "samples/s"

    def losses(self) -> dict[int, float]:
        """Loss by step; for a step committed more than once the last value, which led to the final
        state.
        """
        last = {one.step: one.loss for one in self.steps}
        return {step: loss for step in sorted(last) if (loss := last[step]) is not None}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Data for the plots of one cell: a faulted arm, its incidents, and its control arm."""

    cell: str
    faulted: ArmSeries
    control: ArmSeries | None
    incidents: tuple[Incident, ...]


def read_series(run: RunDirectory, arm: ArmResult) -> ArmSeries | None:
    """The series of an arm; None when its log is missing, unreadable or without a
    committed step.
    """
    if (log := log_of(run, arm)) is None:
        return None
    zero = start_ns(log)
    # every rank records the same global loss; that of the lowest rank is enough
    first: dict[tuple[int, int], Event] = {}
    for event in sorted(commits_of(log), key=lambda one: one.data["rank"] or 0):
        if event.step is not None:
            first.setdefault((event.generation, event.step), event)
    steps = [
        Commit(
            time_s=(event.time_ns - zero) / 1e9,
            step=event.step or 0,
            samples=event.data["samples"],
            loss=None if event.data["loss"] is None else float(event.data["loss"]),
        )
        for event in sorted(first.values(), key=lambda one: one.time_ns)
    ]
    if not steps:
        return None
    return ArmSeries(arm=arm, observed=observed(log), steps=steps, healed=healed_of(log))


def log_of(run: RunDirectory, arm: ArmResult) -> Log | None:
    """The log of an arm; None where it cannot be read."""
    try:
        return read_log(run.events(arm.id))
    except (LogError, OSError):
        return None


def healed_of(log: Log) -> dict[tuple[str, int], float]:
    """(fault, occurrence) -> the second of the arm in which it was healed."""
    zero = start_ns(log)
    return {
        (e.data["fault"], e.data["occurrence"]): (e.time_ns - zero) / 1e9
        for e in log.of(Kind.FAULT_HEALED)
    }


def commits_of(log: Log) -> list[Event]:
    """Commits as logged by the ranks; for a command, derived from its reports, at the end of each
    step.
    """
    if not observed(log):
        return list(log.of(Kind.STEP_COMMITTED))
    return [replace(run.commits[0], time_ns=run.end_ns) for run in history_of(log).runs]


def observed(log: Log) -> bool:
    """Whether the arm ran a command, observed from outside."""
    started = log.first(Kind.RUN_STARTED)
    return started is not None and bool(started.data.get("observed"))


def start_ns(log: Log) -> int:
    """Start time of an arm: ``run_started``, or its first event if the log lacks it."""
    started = log.first(Kind.RUN_STARTED)
    return started.time_ns if started else log.events[0].time_ns if log.events else 0


def read_pairs(run: RunDirectory, results: Results, limit: int) -> list[Pair]:
    """For each of the first ``limit`` cells the repeat with the median recovery, if its log can be
    read.
    """
    pairs = [_read_pair(run, results, cell.id) for cell in results.cells[:limit]]
    return [pair for pair in pairs if pair is not None]


def _read_pair(run: RunDirectory, results: Results, cell: str) -> Pair | None:
    typical = median_incident(results, cell)
    faulted = arms_of(results, cell, "faulted")
    faulted.sort(key=lambda arm: (typical is not None and arm.repeat != typical.repeat, arm.repeat))
    series = next((s for arm in faulted if (s := read_series(run, arm)) is not None), None)
    if series is None:
        return None
    controls = arms_of(results, cell, "control")
    twin = next((arm for arm in controls if arm.repeat == series.arm.repeat), None)
    return Pair(
        cell=cell,
        faulted=series,
        control=read_series(run, twin) if twin else None,
        incidents=tuple(struck(results, series.arm)),
    )
