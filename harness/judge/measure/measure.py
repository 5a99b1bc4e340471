"""Metrics of one arm, from its events alone. For definitions see the design's "Metrics",
``partition`` and ``incidents``.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Kind, Log
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.catalogue import METRICS, MetricDef
from trainchaos.harness.judge.measure.cost import failure_cost
from trainchaos.harness.judge.measure.incidents import acts_of, incidents_of, time_to_redundancy
from trainchaos.harness.judge.measure.partition import (
    Ideal,
    WallTimePartition,
    checkpoint_stalls,
    ideal_of,
    net_s,
    partition,
)
from trainchaos.harness.judge.measure.samples import per_arm, summarise
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import episodes_of, unexplained
from trainchaos.harness.judge.record.history import NS, History, due_in
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.nodes import witnessed
from trainchaos.harness.judge.record.split import diverged
from trainchaos.recovery.data.order import without

__all__ = ["METRICS", "MetricDef", "measure", "per_arm", "summarise"]
FULL_RATE = 0.9
FULL_RATE_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """Samples of the lineage against the reference order. ``misplaced``: first step with samples of
    another; ``witnessed``: samples taken by ranks of a lost node, known only from the reduced
    counts.
    """

    steps: int
    lost: int
    duplicated: int
    unexpected: int
    misplaced: int | None
    lost_in: Mapping[int, int]
    skipped: int = 0
    witnessed: int = 0


@dataclass(frozen=True, kw_only=True)
class ArmMeasures:
    """All measures of one arm. ``values``: metric -> its values, empty if there are none;
    ``bounds``: metric -> largest error of a value due to the clocks of several machines.
    """

    history: History
    episodes: tuple[Episode, ...]
    ideal: Ideal | None
    partition: WallTimePartition
    incidents: tuple[Incident, ...]
    step_time: float | None
    values: Mapping[str, list[float]]
    bounds: Mapping[str, float]


def measure(log: Log, control: Log | None) -> ArmMeasures:
    """Measure one arm against its paired control (None: against itself). Raises LogError without
    ``run_started``.
    """
    history = history_of(log)
    paired = history_of(control) if control is not None else None
    episodes = episodes_of(history)
    ideal = ideal_of(history, paired)
    split = partition(history, ideal, episodes)
    acts = acts_of(history, episodes)
    incidents = tuple(
        _timed(history, hits[0], incident, ideal)
        for hits, incident in zip(acts, incidents_of(history, acts, paired), strict=True)
    )
    times = [net_s(history, run) for run in history.runs if run.survives]
    step_time = statistics.median(times) if times else None
    values = {name: list[float]() for name in METRICS}
    for incident in incidents:
        _add_incident(values, history, incident)
    _add_arm(values, history, split, step_time)
    if history.info.monitored:
        values["alarms_unexplained"].append(float(len(unexplained(history, episodes))))
    return ArmMeasures(
        history=history,
        episodes=episodes,
        ideal=ideal,
        partition=split,
        incidents=incidents,
        step_time=step_time,
        values=values,
        bounds={name: clock_bound(name, history) for name in METRICS},
    )


def clock_bound(name: str, history: History) -> float:
    """Largest error of a metric's value, in its unit, due to the clocks of the arm's nodes. Raises
    KeyError for an unknown metric.
    """
    known = METRICS[name]
    bound = known.clocks * history.log.clock_bound_s
    if known.unit != "ratio" or not bound:
        return bound
    return bound * len(history.worked) / history.wall_s if history.wall_s > 0 else 0.0


def skips_of(history: History, generation: int | None = None) -> dict[int, int]:
    """Samples that the supervisor decided to leave out -> the first step without each.

    ``generation``: only decisions before it started.
    """
    return {
        int(sample): int(event.data["since"])
        for event in history.log.of(Kind.SAMPLES_SKIPPED)
        if generation is None or event.generation < generation
        for sample in event.data["samples"]
    }


def goodput_of(history: History, split: WallTimePartition) -> float:
    """Goodput of an arm; 0 if the job gave up or timed out: an unfinished result is useless."""
    return 0.0 if history.unfinished else split.goodput


def account(history: History) -> Accounting:
    """Compare the lineage's samples with the reference order, as multisets and step by step."""
    return history.once(_account)


def _account(history: History) -> Accounting:
    info, lineage = history.info, history.lineage
    # of the steps in which the two differ; where they do not, neither is more than the other
    reference: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    misplaced: int | None = None
    lost_in: dict[int, int] = {}
    skipped, unseen, skips = 0, 0, bool(skips_of(history))
    steps = range(1, history.committed_step + 1)
    for step in steps:
        run = lineage.get(step)
        required = _required(history, step) if skips else due_in(info, step)
        skipped += info.global_batch - len(required)
        took = run.samples if run is not None else []
        if len(took) == len(required) == len(alike := set(required)) and alike == set(took):
            continue
        due, got = Counter(required), Counter(took)
        if due - got and run is not None:
            rest = witnessed(history, run, due)
            got += rest
            unseen += rest.total()
        reference.update(due)
        taken.update(got)
        if due - got:
            lost_in[step] = (due - got).total()
        if got - due and misplaced is None:
            misplaced = step
    extra = taken - reference
    every = {sample for step in steps for sample in _required(history, step)} if extra else set()
    duplicated = sum(count for sample, count in extra.items() if sample in every)
    return Accounting(
        steps=history.committed_step,
        lost=(reference - taken).total(),
        duplicated=duplicated,
        unexpected=extra.total() - duplicated,
        misplaced=misplaced,
        lost_in=lost_in,
        skipped=skipped,
        witnessed=unseen,
    )


def _required(history: History, step: int) -> Sequence[int]:
    """The samples that a step had to take: its batch, without what was left out by decision."""
    ids = due_in(history.info, step)
    run = history.lineage.get(step)
    return without([*ids], step, skips_of(history, run.generation if run is not None else None))


def _timed(history: History, episode: Episode, incident: Incident, ideal: Ideal | None) -> Incident:
    """The incident with the times until the job was at full rate and fully redundant again."""
    if incident.outcome == "not-landed":
        return incident
    return incident.model_copy(
        update={
            "time_to_full_rate": _time_to_full_rate(history, episode, incident, ideal),
            "time_to_redundancy": time_to_redundancy(history, episode.injected, incident),
        }
    )


def _time_to_full_rate(
    history: History, episode: Episode, incident: Incident, ideal: Ideal | None
) -> float | None:
    """Seconds to the commit of the first step of a window at full rate; None if too few steps are
    left to judge.
    """
    if incident.outcome in ("hang", "fail-stop"):
        return None if history.cut_short else math.inf
    if episode.injected is None or ideal is None or ideal.step_s <= 0:
        return None
    first, since = incident.first_new_step, episode.injected.time_ns
    again_s = incident.recovery_time if first is None else None
    if again_s is not None and math.isfinite(again_s):
        since += int(again_s * NS)  # until then, steps were done again
    # of a command that reports every so many steps, a step is known to be done later than it ended
    done = {run.step: max(run.end_ns, run.committed_ns or 0) for run in history.lineage.values()}
    runs = [r for r in history.lineage.values() if r.step >= (first or 0) and done[r.step] > since]
    for start in range(len(runs) - FULL_RATE_STEPS + 1):
        window = runs[start : start + FULL_RATE_STEPS]
        rates = [
            run.commits[0].data["samples"] / took if (took := net_s(history, run)) > 0 else math.inf
            for run in window
        ]
        if statistics.median(rates) >= FULL_RATE * history.info.global_batch / ideal.step_s:
            return (done[window[0].step] - episode.injected.time_ns) / NS
    return math.inf if len(runs) >= FULL_RATE_STEPS else None


def _add_incident(values: dict[str, list[float]], history: History, incident: Incident) -> None:
    if incident.outcome == "not-landed":
        return
    took_s = incident.recovery_time
    for name in ("detection_time", "recovery_time", "time_to_full_rate", "time_to_redundancy"):
        if (value := getattr(incident, name)) is not None:
            values[name].append(value)
    known = incident.steps_lost_unsure != "not known"
    if took_s is not None and incident.answered_with is None and known:
        lost = math.inf if incident.never_recovered else float(incident.steps_lost)
        values["steps_lost"].append(lost)
    if took_s is not None or incident.outcome == "masked":
        provisioned = history.info.ranks + history.info.spares
        values["failure_cost"].append(failure_cost(provisioned, took_s))
    for span in incident.phases:
        if (name := f"{span.name}_time") in values:
            values[name].append(span.seconds)


def _add_arm(
    values: dict[str, list[float]],
    history: History,
    split: WallTimePartition,
    step_time: float | None,
) -> None:
    info, log = history.info, history.log
    if not info.observed:
        found, cut = account(history), history.cut_short
        # A job that ended early never used the rest; one cut short by its harness might have.
        unused = 0 if cut else (info.steps - history.committed_step) * info.global_batch
        values["samples_lost"].append(float(found.lost + unused))
        values["samples_skipped"].append(float(found.skipped))
        values["samples_duplicated"].append(float(found.duplicated))
        values["replicas_diverged"].append(float(len(diverged(history))))
    values["saves_failed"].append(float(sum(1 for _ in log.of(Kind.CHECKPOINT_FAILED))))
    values["checkpoint_stall"].extend(checkpoint_stalls(history).values())
    if step_time is not None:
        values["step_time"].append(step_time)
    if split.wall_s > 0 and not history.cut_short:
        samples = sum(run.commits[0].data["samples"] for run in history.lineage.values())
        values["goodput"].append(goodput_of(history, split))
        values["ettr"].append(split.productive_s / split.wall_s)
        values["throughput"].append(samples / split.wall_s)
