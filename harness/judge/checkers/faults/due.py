"""How often each fault had to fire, given its plan and how long the arm lasted."""

from __future__ import annotations

from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.fault import PHASES, FaultSpec, TraceSpec
from trainchaos.harness.inject.occurrence import LET_GO
from trainchaos.harness.judge.evidence.evidence import Evidence
from trainchaos.harness.judge.record.episode import Episode, processes_hit
from trainchaos.harness.judge.record.history import NS

SAVE = "checkpoint"
RUN_ENDED = "the run ended"
"""Prefix of the injector's reason for an occurrence whose effect the run was too short to show."""


def shortfall(evidence: Evidence, fault: FaultSpec, fired: int) -> str | None:
    """What is missing when a fault fired ``fired`` times; None if it fired as often as planned.

    Arrivals (``mtbf``, ``weibull``, a trace of times) are due only while the arm lasted, and one
    that the blast radius refused is not missing if another one fired.
    """
    at = _planned_at(evidence, fault)
    refused = refusals(evidence, fault.id)
    if _arrives(fault):
        return _arrivals(evidence, fault, at.get("times_s") or [], fired, refused)
    if refused:
        return f"{fault.id}: {refused[0].data['reason']}"
    if fired >= _times(fault, at):
        return None
    return _never_fired(evidence, fault, at, fired)


def excused(evidence: Evidence, episode: Episode) -> bool:
    """Whether an arrival came too late in the run for its effect to be seen, and another occurrence
    of the fault landed.
    """
    fault = evidence.fault(episode.fault)
    if fault is None or episode.failed is None or not _arrives(fault):
        return False
    others = (e for e in evidence.measures.episodes if e.fault == episode.fault)
    return str(episode.failed.data["reason"]).startswith(RUN_ENDED) and any(
        e.landed for e in others
    )


def all_declined(evidence: Evidence) -> bool:
    """Whether the probabilities of all faults ruled out every occurrence."""
    faults = evidence.cell.scenario.faults
    plans = [_planned_at(evidence, fault) for fault in faults]
    return all(
        at.get("declined") and not at.get("times_s") and not at.get("points") and not _later(fault)
        for fault, at in zip(faults, plans, strict=True)
    )


def refusals(evidence: Evidence, fault: str) -> list[Event]:
    """Occurrences that were due but not injected, because the blast radius refused them."""
    injected = {
        (e.data["fault"], e.data["occurrence"]) for e in evidence.log.of(Kind.FAULT_INJECTED)
    }
    return [
        e
        for e in evidence.log.of(Kind.FAULT_FAILED)
        if e.data["fault"] == fault and (fault, e.data["occurrence"]) not in injected
    ]


def _planned_at(evidence: Evidence, fault: FaultSpec) -> dict[str, Any]:
    planned = (e for e in evidence.log.of(Kind.FAULT_PLANNED) if e.data["fault"] == fault.id)
    event = next(planned, None)
    return (
        {**(event.data["at"] or {}), "ranks": (event.data["target"] or {}).get("ranks")}
        if event
        else {}
    )


def _arrives(fault: FaultSpec) -> bool:
    at = fault.at
    return (
        at.mtbf is not None
        or at.weibull is not None
        or (isinstance(at.trace, TraceSpec) and bool(at.trace.times))
    )


def _arrivals(
    evidence: Evidence, fault: FaultSpec, times: list[float], fired: int, refused: list[Event]
) -> str | None:
    if fired:
        return None
    if refused:
        return f"{fault.id}: {refused[0].data['reason']}"
    lasted = _trained_s(evidence)
    if not times:
        return f"{fault.id}: its probability ruled out every arrival"
    return (
        f"{fault.id} was first due {times[0]:g} s after the first step, and training lasted"
        f" {lasted:.1f} s: raise workload.steps or shorten the mean time"
    )


def _trained_s(evidence: Evidence) -> float:
    history = evidence.history
    began = min((g.ready_ns for g in history.generations if g.ready_ns), default=history.end_ns)
    return (history.end_ns - began) / NS


def _times(fault: FaultSpec, at: dict[str, Any]) -> int:
    if "points" not in at:  # an older log
        return max(1, len(fault.at.all_steps()))
    by_event = at.get("event") is not None and not at.get("declined")
    return len(at["points"]) + len(at.get("times_s") or ()) + int(by_event)


def _later(fault: FaultSpec) -> bool:
    """Whether the fault may still fire at a later occurrence of its event."""
    return fault.at.event is not None and fault.retrigger != "once"


def _why_not(evidence: Evidence, planned: dict[str, Any], step: int) -> str:
    """Why a step that was committed had no fault."""
    ranks = planned.get("ranks") or ()
    worlds = [run.world for run in evidence.history.runs if run.step == step]
    if ranks and worlds and max(worlds) <= min(ranks):
        return f"and there was no rank {min(ranks)} in it: {max(worlds)} ranks made it"
    if lost := _lost_before(evidence, planned, step):
        process, fault = lost
        return f"and {process}, which it was for, had been lost to {fault} before it came there"
    if (other := _held_before(evidence, planned, step)) is not None:
        return f"and the generation was lost whose ranks held there for {other}"
    return "but was never injected"


def _held_before(evidence: Evidence, planned: dict[str, Any], step: int) -> str | None:
    """Another fault for which ranks held in the same step, at or before the planned phase, when
    their generation was lost: none of them came to this fault, and no later generation made the
    step again. None: there was no such fault.
    """
    there = _phases(planned, step)
    let_go = {
        str(event.data["fault"])
        for event in evidence.log.of(Kind.FAULT_FAILED)
        if event.step == step and str(event.data["reason"]).endswith(LET_GO)
    }
    for other in evidence.cell.scenario.faults if there else ():
        held_at = _phases(_planned_at(evidence, other), step)
        if other.id not in let_go or not held_at or min(held_at) > max(there):
            continue
        lost = _lost_at(evidence, step, min(held_at))
        if lost is not None and not _made_again(evidence, planned, step, lost):
            return other.id
    return None


def _lost_at(evidence: Evidence, step: int, phase: int) -> int | None:
    """The first generation that came to this place of a step, as far as its ranks tell, and that
    was lost. None: there is none.

    Which one ranks held in is not in the log: the injector says that they did when it closes.
    """
    history, log = evidence.history, evidence.log
    kind, done = (Kind.BATCH_TAKEN, step) if phase else (Kind.STEP_COMMITTED, step - 1)
    if phase == PHASES.index(SAVE):
        kind = Kind.STEP_COMMITTED
    came = {event.generation for event in log.of(kind) if event.step == done}
    if not phase:
        came |= {row.number for row in history.generations if row.resume_step == step - 1}
    failed = {event.generation for event in log.of(Kind.FAILURE_DETECTED)}
    ended = (row.number for row in history.generations if row.fenced_ns or row.number in failed)
    return next((number for number in ended if number in came), None)


def _made_again(evidence: Evidence, planned: dict[str, Any], step: int, lost: int) -> bool:
    """Whether a rank that a fault was planned for made the step again, up to the fault's phase,
    after a generation was lost. One that only completes the step it had reduced does not.
    """
    log, ranks = evidence.log, set(planned.get("ranks") or ())
    taken = {
        (event.actor, event.generation)
        for event in log.of(Kind.BATCH_TAKEN)
        if event.step == step and event.generation > lost
    }
    made = {
        (event.actor, event.generation)
        for event in log.of(Kind.STEP_COMMITTED)
        if event.step == step and (not ranks or event.data["rank"] in ranks)
    }
    made &= taken
    if _phases(planned, step) == [PHASES.index(SAVE)]:  # ranks that do not save never come there
        saves = log.of(Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_PART)
        made &= {(event.actor, event.generation) for event in saves if event.step == step}
    return bool(made)


def _phases(planned: dict[str, Any], step: int) -> list[int]:
    """The phases of a step for which a fault was planned, as their places in PHASES."""
    there = (phase for at, phase in planned.get("points") or () if at == step)
    return [PHASES.index(phase) for phase in there if phase in PHASES]


def _lost_before(evidence: Evidence, planned: dict[str, Any], step: int) -> tuple[str, str] | None:
    """A target process of a planned fault, and the other fault that removed it first; or None.

    The other fault hit it in the same step, at or before the planned phase, and the job lost the
    process. No targeted rank reached the planned point in any generation: the other ranks had done
    the step, and it was not repeated.
    """
    ranks, log = set(planned.get("ranks") or ()), evidence.log
    phases = _phases(planned, step)
    lost = {e.data["process"] for e in log.of(Kind.FAILURE_DETECTED) if e.step == step}
    made = [e for e in log.of(Kind.STEP_COMMITTED) if e.step == step and e.data["rank"] in ranks]
    if phases == [PHASES.index(SAVE)]:  # ranks that do not save never come there
        saves = log.of(Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_PART)
        savers = {e.actor for e in saves if e.step == step}
        made = [e for e in made if e.actor in savers]
    for event in log.of(Kind.FAULT_INJECTED) if phases else ():
        phase = event.data.get("phase")
        mine = [name for name in _hit_ranks(evidence, event, ranks) if name in lost]
        if event.step != step or phase not in PHASES or PHASES.index(phase) > max(phases):
            continue
        for process in mine:
            # A step is committed before it is saved: a rank lost at its save has committed it.
            if not any(e.actor != process or phase != SAVE for e in made):
                return process, str(event.data["fault"])
    return None


def _hit_ranks(evidence: Evidence, injected: Event, ranks: set[int]) -> list[str]:
    """Processes that a fault hit as it was injected, or the whole node they were on, and that held
    one of these ranks.
    """
    generation = evidence.history.generation(injected.generation)
    members = generation.members if generation else ()
    return [
        name for name in processes_hit(injected) if name in members and members.index(name) in ranks
    ]


def _first_missing(evidence: Evidence, fault: FaultSpec, steps: list[int], fired: int) -> int:
    """The first planned step in which the fault did not act. If an injection names no step of its
    own (one on a checkpoint carries the checkpoint's step), the step after the first ``fired``.
    """
    mine = [e for e in evidence.measures.episodes if e.fault == fault.id and e.injected]
    acts = [
        e.injected.step if e.injected and not e.target.get("checkpoint") else None for e in mine
    ]
    missing = [step for step in steps if step not in acts]
    return steps[min(fired, len(steps) - 1)] if None in acts or not missing else missing[0]


def _seen_by_supervisor(evidence: Evidence) -> int | None:
    """The last step that the supervisor knew to be made when the job ended; None if its log does
    not say.
    """
    ended = evidence.log.first(Kind.RUN_FINISHED)
    step = ended.data.get("committed_step") if ended is not None else None
    return step if type(step) is int else None


def _never_fired(evidence: Evidence, fault: FaultSpec, at: dict[str, Any], fired: int) -> str:
    done, history = evidence.history.committed_step, evidence.history
    cure = "lower at.{} or raise workload.steps"
    steps = sorted(int(point[0]) for point in at.get("points") or ()) or list(fault.at.all_steps())
    if steps:
        due = _first_missing(evidence, fault, steps, fired)
        if due > done and history.cut_short:
            return (
                f"{fault.id} was due at step {due}, the arm was cut short at {done}: run it again"
            )
        if due > done:
            early = evidence.history.outcome != "completed"
            why = "see why it ended there" if early else cure.format("step")
            return f"{fault.id} was due at step {due}, the run ended at {done}: {why}"
        seen = _seen_by_supervisor(evidence)
        if seen is not None and due > seen + 1:
            return (
                f"{fault.id} was due at step {due}, the supervisor saw the end of step {seen} as"
                " the last: the ranks' progress was hidden from it"
            )
        if evidence.cell.scenario.workload.points:
            return (
                f"{fault.id} was due at step {due}, and no rank it was for reached its point: call"
                " beacon.point there, in the process of the rank, with the step as it is"
                " reported"
            )
        return f"{fault.id} was due at step {due}, {_why_not(evidence, at, due)}"
    if fault.at.time is not None:
        return (
            f"{fault.id} was due {fault.at.time:g} s after the first step, the run took "
            f"{history.wall_s:.1f} s: {cure.format('time')}"
        )
    return (
        f"{fault.id} waited for {fault.at.event} number {fault.at.nth}, which never came:"
        f" {cure.format('nth')}"
    )
