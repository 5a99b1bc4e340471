"""Reads series over time and step from the event logs of an arm."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.log import Event, Kind, Log, read_log
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.reports.content.facts import arms_of, median_incident, struck

MAX_POINTS = 1500


@dataclass(frozen=True, kw_only=True)
class ArmSeries:
    """Commits of one arm, by time. ``observed``: the steps of a command, as far as it reported
    them; ``steps``: columns time_s (since the start of the arm), generation, step, samples, loss;
    ``healed``: (fault, occurrence) -> the second it was healed.
    """

    arm: ArmResult
    observed: bool
    steps: pandas.DataFrame
    healed: dict[tuple[str, int], float]

    def throughput(self) -> list[tuple[float, float]]:
        """(second, samples/s) between commits of *new* steps; redone steps do not count. Steps with
        the same time, such as lines of a command read together, count as one. Without the first
        interval, which would count start-up as a slow step.
        """
        seen = self.steps["step"].cummax().shift(fill_value=0)
        new = self.steps[self.steps["step"] > seen].groupby("time_s", as_index=False)["samples"]
        frame = new.sum()
        groups = frame.groupby(frame.index // max(1, -(-len(frame) // MAX_POINTS)))
        ends, samples = groups["time_s"].last(), groups["samples"].sum()
        return list(zip(ends, samples / ends.diff(), strict=True))[1:]

    @property
    def rate_unit(self) -> str:
        """Unit of ``throughput``; a command may not report samples."""
        return "steps/s" if self.observed and (self.steps["samples"] == 1).all() else "samples/s"

    def losses(self) -> dict[int, float]:
        """Loss by step; for a step committed more than once the last value, which led to the final
        state.
        """
        last = self.steps.drop_duplicates("step", keep="last").set_index("step")["loss"]
        return {int(step): float(loss) for step, loss in last.sort_index().dropna().items()}


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
    rows = [
        (
            *(e.generation, e.step, e.data["rank"] or 0, (e.time_ns - zero) / 1e9),
            *(e.data["samples"], e.data["loss"]),
        )
        for e in commits_of(log)
        if e.step is not None
    ]
    if not rows:
        return None
    columns = ["generation", "step", "rank", "time_s", "samples", "loss"]
    frame = pandas.DataFrame(rows, columns=columns).astype({"loss": float, "time_s": float})
    # every rank records the same global loss: one record for each commit is enough
    frame = frame.sort_values(["generation", "step", "rank"]).drop_duplicates(
        ["generation", "step"]
    )
    return ArmSeries(
        arm=arm,
        observed=observed(log),
        steps=frame.sort_values("time_s").drop(columns="rank").reset_index(drop=True),
        healed=healed_of(log),
    )


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
