"""Whether the record is complete and consistent, and nothing was left behind."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from operator import le
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, passed, some, unknown, verdict_of
from trainchaos.harness.judge.lifecycle.lives import first_lines
from trainchaos.harness.judge.results import Finding

CLOSURE = 0.01
CLOCK_SLACK_S = 0.001


def time_closure(evidence: Evidence) -> Finding:
    """Times add up: goodput and badput make the wall time within 1 %, no clock runs backwards,
    phases sum to the recovery time, and no rank accounts for more step time than passed.
    """
    measures, history = evidence.measures, evidence.history
    problems = []
    for actor, log in sorted(evidence.log.actors.items()):
        if all(map(le, log.times, log.times[1:])):
            continue
        for before, after in itertools.pairwise(log.events):
            if after.time_ns < before.time_ns:
                problems.append(f"the clock of {actor} runs backwards at seq {after.seq}")
    residual, wall = measures.partition.residual_s, history.wall_s
    if wall <= 0 and history.finished is not None:
        problems.append(f"the arm took {wall:.3f} s")
    elif wall > 0 and abs(residual) > CLOSURE * wall:
        problems.append(f"{residual:.3f} s of {wall:.3f} s are in no class")
    for incident in measures.incidents:
        total = sum(span.seconds for span in incident.phases)
        recovery_s = incident.recovery_time or 0.0
        # An infinite recovery time is a judgement ("never recovered"), not a duration.
        if incident.phases and math.isfinite(recovery_s) and abs(total - recovery_s) > 1e-6:
            problems.append(
                f"{incident.fault}: phases sum to {total:.6f} s, recovery took"
                f" {incident.recovery_time} s"
            )
    problems += _overdrawn(evidence)
    return verdict_of(problems, f"residual {residual:+.3f} s of {wall:.3f} s")


def _overdrawn(evidence: Evidence) -> list[str]:
    """Ranks whose own account of a generation's steps exceeds the time those steps took."""
    problems = []
    for generation in evidence.history.worked:
        runs = evidence.history.runs_of(generation.number)
        phases: dict[str, list[Any]] = defaultdict(list)
        last_ns: dict[str, int] = {}
        for run in runs:
            for actor, seconds in zip(run.done.actors, run.done.said["seconds"], strict=True):
                phases[actor].append(seconds)
            last_ns.update(zip(run.done.actors, run.done.times, strict=True))
        for actor in generation.members:
            if actor not in phases:
                continue
            spent = (seconds.values() for seconds in phases[actor])
            claimed = sum(map(float, itertools.chain.from_iterable(spent)))
            passed_s = (
                last_ns[actor]
                - min(runs[0].start_ns, _first_batch(evidence, actor, generation.number))
            ) / 1e9
            if claimed > passed_s * (1 + CLOSURE) + CLOCK_SLACK_S * len(phases[actor]):
                problems.append(
                    f"{actor} accounts for {claimed:.3f} s of steps in {passed_s:.3f} s"
                )
    return problems


def _first_batch(evidence: Evidence, actor: str, generation: int) -> int:
    first = first_lines(evidence.log)[generation].get((actor, Kind.BATCH_TAKEN))
    return first.time_ns if first is not None else 2**63


def no_orphans(evidence: Evidence) -> Finding:
    """The harness left nothing: no process, port or shared memory; every process was seen to exit,
    and every fault was healed.
    """
    left = evidence.log.first(Kind.LEFTOVERS)
    if left is None:
        return unknown("leftovers were not looked for: the harness died before it could")
    problems = [
        f"{what} left: {left.data[what]}"
        for what in ("processes", "ports", "shared_memory")
        if left.data[what]
    ]
    exited = {event.data["process"] for event in evidence.log.of(Kind.PROCESS_EXITED)}
    spawned = [event.data["process"] for event in evidence.log.of(Kind.PROCESS_SPAWNED)]
    problems += [f"{name} was never seen to exit" for name in spawned if name not in exited]
    for episode in evidence.measures.episodes:
        if episode.injected and not episode.failed and episode.healed is None:
            problems.append(f"{episode.fault} (occurrence {episode.occurrence}) was not healed")
    return verdict_of(problems, f"{len(spawned)} processes, all gone")


def evidence_complete(evidence: Evidence) -> Finding:
    """No log has a gap, torn line or unexplained end; the orchestrator's has its start and end."""
    problems = list(evidence.log.problems)
    if evidence.log.first(Kind.RUN_STARTED) is None:
        problems.append("no run_started")
    if evidence.log.first(Kind.RUN_FINISHED) is None:
        problems.append("no run_finished: the harness did not get to the end")
    problems += [f"no log of {name}" for name in evidence.log.missing_actors]
    if problems:
        return unknown(some(problems))
    return passed(f"{len(evidence.log.events)} events of {len(evidence.log.actors)} actors")
