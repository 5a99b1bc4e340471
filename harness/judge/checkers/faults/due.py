"""How often each fault had to fire, given its plan and how long the arm lasted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.fault import PHASES, FaultSpec, TraceSpec
from trainchaos.harness.judge.evidence.evidence import Evidence
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS, History
from trainchaos.harness.judge.results import Arrivals

SAVE = PHASES.index("checkpoint")
RUN_ENDED = "the run ended"
"""Prefix of the injector's reason for an occurrence whose effect the run was too short to show."""
STEPS_TO_ACT = 2
"""Steps that begin after an arrival and within which it acts: some faults wait for a rank's next
one.
"""
EARLY_NS = 100_000_000
"""How much earlier than by the log an arrival may be due: training begins between two lines."""


def arrives(fault: FaultSpec) -> bool:
    """Whether it comes at times that are drawn or traced."""
    traced = isinstance(fault.at.trace, TraceSpec) and bool(fault.at.trace.times)
    return fault.at.mtbf is not None or fault.at.weibull is not None or traced


def arrivals_of(
    history: History, episodes: Sequence[Episode], faults: Sequence[FaultSpec]
) -> dict[str, Arrivals]:
    """Fault -> its arrivals (``mtbf``, ``weibull``, a trace of times). Due: planned until the arm
    ended, or until its last step where the job completed, as nothing is injected after that. Fired:
    each act once, whatever it hit.
    """
    ended = history.end_ns
    if history.outcome == "completed":
        ended = max((run.end_ns for run in history.runs), default=ended)
    planned = {e.data["fault"]: e.data["at"] or {} for e in history.log.of(Kind.FAULT_PLANNED)}
    found = {}
    for fault in filter(arrives, faults):
        times = planned.get(fault.id, {}).get("times_s") or []
        acts = {
            one.injected.data.get("act", one.occurrence)
            for one in episodes
            if one.fault == fault.id and one.injected is not None
        }
        due = sum(history.began_ns + time_s * NS <= ended for time_s in times)
        fired = min(len(acts), len(times))  # one may be done again, where it is triggered anew
        if times:
            found[fault.id] = Arrivals(fired=fired, due=max(due, fired))
    return found


def shortfall(evidence: Evidence, fault: FaultSpec, fired: int) -> str | None:
    """What is missing when a fault fired ``fired`` times; None if it fired as often as planned.

    Arrivals are due only while the arm trained; each that was due fired, or the injector says why
    it did not. One that the blast radius refused is not missing if another one fired.
    """
    at = _planned_at(evidence, fault)
    acted, failed = (
        {e.data["occurrence"]: e for e in evidence.log.of(kind) if e.data["fault"] == fault.id}
        for kind in (Kind.FAULT_INJECTED, Kind.FAULT_FAILED)
    )
    refused = [event for occurrence, event in failed.items() if occurrence not in acted]
    if arrives(fault):
        return _arrivals(evidence, fault, at.get("times_s") or [], fired, refused)
    if refused:
        return f"{fault.id}: {refused[0].data['reason']}"
    times = max(1, len(fault.at.all_steps()))
    if "points" in at:
        by_event = at.get("event") is not None and not at.get("declined")
        times = len(at["points"]) + len(at.get("times_s") or ()) + by_event
    return None if fired >= times else _never_fired(evidence, fault, at, fired)


def excused(evidence: Evidence, episode: Episode) -> bool:
    """Whether an arrival came too late in the run for its effect to be seen, and another occurrence
    of the fault landed.
    """
    fault = evidence.fault(episode.fault)
    if fault is None or episode.failed is None or not arrives(fault):
        return False
    landed = any(e.landed for e in evidence.measures.episodes if e.fault == episode.fault)
    return landed and str(episode.failed.data["reason"]).startswith(RUN_ENDED)


def all_declined(evidence: Evidence) -> bool:
    """Whether the probabilities of all faults ruled out every occurrence."""
    faults = evidence.cell.scenario.faults
    plans = [(fault, _planned_at(evidence, fault)) for fault in faults]
    return all(
        at.get("declined")
        and not at.get("times_s")
        and not at.get("points")
        and (fault.at.event is None or fault.retrigger == "once")  # else it may fire at a later one
        for fault, at in plans
    )


def _planned_at(evidence: Evidence, fault: FaultSpec) -> dict[str, Any]:
    for event in evidence.log.of(Kind.FAULT_PLANNED):
        if event.data["fault"] == fault.id:
            return {**(event.data["at"] or {}), "ranks": (event.data["target"] or {}).get("ranks")}
    return {}


def _arrivals(
    evidence: Evidence, fault: FaultSpec, times_s: list[float], fired: int, refused: list[Event]
) -> str | None:
    if not times_s:
        return f"{fault.id}: its probability ruled out every arrival"
    if not fired and refused:
        return f"{fault.id}: {refused[0].data['reason']}"
    began, ended = evidence.history.began_ns, evidence.history.end_ns
    if not fired and times_s[0] > (ended - began) / NS:
        return (
            f"{fault.id} was first due {times_s[0]:g} s after the first step, and training lasted"
            f" {(ended - began) / NS:.1f} s: raise workload.steps or shorten the mean time"
        )
    came_ns = [began + round(time_s * NS) for time_s in times_s]
    if fired + len(refused) >= sum(at_ns <= ended for at_ns in came_ns):
        return None  # each is accounted for, one that had to wait for its target among them
    acted = sorted(
        e.time_ns
        for e in evidence.log.of(Kind.FAULT_INJECTED, Kind.FAULT_FAILED)
        if e.data["fault"] == fault.id
    )
    runs = sorted(evidence.history.runs, key=lambda run: run.start_ns)
    due, missing = 0, []
    for at_ns in came_ns:
        first = bisect_left(runs, at_ns, key=lambda run: run.start_ns)
        following = runs[first : first + STEPS_TO_ACT]
        if len(following) < STEPS_TO_ACT:
            continue
        due += 1
        place = bisect_left(acted, at_ns - EARLY_NS)
        if place == len(acted) or acted[place] > max(run.end_ns for run in following):
            missing.append(at_ns)
    if len(missing) <= len(refused):
        return None
    return (
        f"{fault.id}: {due} arrivals were due, and {len(missing) - len(refused)} of them never"
        f" fired, without a reason; one of them {(missing[0] - began) / NS:.1f} s after the first"
        " step"
    )


def _never_fired(evidence: Evidence, fault: FaultSpec, at: dict[str, Any], fired: int) -> str:
    steps = sorted(int(point[0]) for point in at.get("points") or ()) or [*fault.at.all_steps()]
    if steps:
        due = _first_missing(evidence, fault, steps, fired)
        return f"{fault.id} was due at step {due}, {_why_not(evidence, at, due)}"
    cure = "lower at.{} or raise workload.steps"
    if fault.at.time is not None:
        return (
            f"{fault.id} was due {fault.at.time:g} s after the first step, the run took "
            f"{evidence.history.wall_s:.1f} s: {cure.format('time')}"
        )
    return (
        f"{fault.id} waited for {fault.at.event} number {fault.at.nth}, which never came:"
        f" {cure.format('nth')}"
    )


def _first_missing(evidence: Evidence, fault: FaultSpec, steps: list[int], fired: int) -> int:
    """The first planned step in which the fault did not act. If an injection names no step of its
    own (one on a checkpoint carries the checkpoint's step), the step after the first ``fired``.
    """
    acts = [
        None if e.target.get("checkpoint") else e.injected.step
        for e in evidence.measures.episodes
        if e.fault == fault.id and e.injected
    ]
    missing = [step for step in steps if step not in acts]
    return steps[min(fired, len(steps) - 1)] if None in acts or not missing else missing[0]


def _why_not(evidence: Evidence, planned: dict[str, Any], step: int) -> str:
    """Why a fault did not act in a step."""
    history = evidence.history
    done = history.committed_step
    if step > done and history.cut_short:
        return f"the arm was cut short at {done}: run it again"
    if step > done:
        early = history.outcome != "completed"
        cure = "see why it ended there" if early else "lower at.step or raise workload.steps"
        return f"the run ended at {done}: {cure}"
    seen = history.finished.data.get("committed_step") if history.finished else None
    if isinstance(seen, int) and step > seen + 1:
        return (
            f"the supervisor saw the end of step {seen} as the last: the ranks' progress was hidden"
            " from it"
        )
    if evidence.cell.scenario.workload.points:
        return (
            "and no rank it was for reached its point: call beacon.point there, in the process of"
            " the rank, with the step as it is reported"
        )
    came = _came_there(evidence, planned, step)
    return "but was never injected" if came else "and no rank that it was for came there"


def _came_there(evidence: Evidence, planned: dict[str, Any], step: int) -> bool:
    """Whether a rank that a fault was planned for got past its point of a step: another fault hit
    it later in the step, or it committed the step, or, for a fault in its save, it took the batch
    of the next one after it had saved.
    """
    phases = {PHASES.index(phase) for at, phase in planned.get("points") or () if at == step}
    ranks, log = set(planned.get("ranks") or ()), evidence.log
    for hit in log.of(Kind.FAULT_INJECTED):
        rank, phase = (hit.data["target"] or {}).get("rank"), hit.data.get("phase")
        there = hit.step == step and rank in ranks and phase in PHASES
        if there and PHASES.index(phase) > max(phases, default=len(PHASES)):
            return True
    saves = phases == {SAVE}
    kind, done = (Kind.BATCH_TAKEN, step + 1) if saves else (Kind.STEP_COMMITTED, step)
    saved = {
        (e.actor, e.generation)
        for e in log.of(Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_PART)
        if e.step == step
    }
    return any(
        event.step == done
        and (not ranks or event.data["rank"] in ranks)
        and (not saves or (event.actor, event.generation) in saved)
        for event in log.of(kind)
    )
