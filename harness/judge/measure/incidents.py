"""Incidents: what an act of a fault cost, phase by phase, and how it ended.

``recovery_time`` runs from the injection to the job's first commit, by a generation formed after
the failure, of a step beyond every step that any rank of earlier generations committed, even if a
later rollback discards that step. Counting a commit by a single rank can only lengthen it. It
is infinite if the job hung, gave up or kept corrupted values. It has no value if the fault was
masked, or if the job completed and no step was left to commit after the failure.

Its phases end at: failure detected; survivors parked (or the decision, where survivors are not
kept); last group formed by the generation that made that commit (failed attempts and process starts
belong to this); its members hold their state; the old highest step is committed again; the first
new commit. They share their boundaries, so they sum exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.incident import PHASE_NAMES, Hit, Incident, Outcome, PhaseSpan
from trainchaos.harness.judge.measure.digests import same_parameters
from trainchaos.harness.judge.record.commands import (
    at_the_end_again,
    ended_ns,
    is_bad,
    lasting,
    spoilt_since,
    strength_of,
)
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS, Generation, History, StepRun
from trainchaos.harness.judge.record.nodes import homes, nodes_hit
from trainchaos.harness.judge.record.observed import grid_of, stride_of
from trainchaos.recovery.policy.strategy import ANNOUNCED


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How a failure was answered. ``first_new``: first new step run; None: the job never got that
    far.
    """

    high_water: int
    restored: Generation | None
    restored_step: int | None
    first_new: StepRun | None
    concerns_job: bool


def recovery_of(history: History, failure: Event, acting_until_ns: int = 0) -> Recovery:
    """Find what followed a failure. A failure outside the generation (a spare's) does not concern
    the job. ``acting_until_ns``: until when the fault behind it acted; see ``record.commands``.
    """
    failed = history.generation_at(failure.time_ns)
    number = failed.number if failed else 0
    mark = history.high_water(number)
    later = [g for g in history.worked if g.number > number]
    new = [
        run
        for run in history.runs
        if run.generation > number and run.step > mark and run.committed_ns is not None
    ]
    first = min(new, key=lambda run: run.committed_ns or 0, default=None)
    if history.info.observed and first is not None:
        ended = ended_ns(history, failure)
        first, mark = lasting(
            history, number, mark, acting_until_ns=acting_until_ns, ended_ns=ended
        )
    answered = [g for g in later if first is None or g.number <= first.generation]
    return Recovery(
        high_water=mark,
        restored=later[0] if later else None,
        restored_step=min((g.resume_step or 0 for g in answered), default=None),
        first_new=first,
        concerns_job=failed is None or failure.data["process"] in (None, *failed.members),
    )


def incident_of(episode: Episode, history: History, control: History | None) -> Incident:
    """The incident of one episode. A fault that never fired gives one with occurrence -1 and
    outcome ``not-landed``.
    """
    injected, failure, landed = episode.injected, episode.failure, episode.landed
    # of several failures (a node may take a spare and a rank along) the first that concerns the job
    acting_ns = _acting_until(episode, history)
    answers = (recovery_of(history, one, acting_ns) for one in episode.failures)
    answer = next((answer for answer in answers if answer.concerns_job), None)
    lost, unsure = _steps_lost(history, answer)
    short, harm = _short(episode, history), _harm(episode, history)
    outcome = _outcome(episode, history, control, answer, short=bool(short), harm=bool(harm))
    ranks = {"ranks": short} if short and outcome == "degraded" else {}
    return Incident(
        fault=episode.fault,
        kind=episode.kind,
        cell=history.info.cell,
        repeat=history.info.repeat,
        occurrence=episode.occurrence,
        target=episode.target,
        step=injected.step if injected else None,
        injected_s=(injected.time_ns - history.start_ns) / NS if injected else 0.0,
        landed=landed is not None,
        witness=str(landed.data["witness"]) if landed else None,
        evidence=_evidence(episode) | harm | ranks,
        healed=episode.healed is not None,
        detected_by=str(failure.data["cause"]) if failure else None,
        blamed_rank=failure.data["rank"] if failure else None,
        detection_time=_detection(episode, outcome, history.cut_short),
        recovery_time=_recovery_time(episode, history, answer, outcome, bad=bool(harm)),
        outcome=outcome,
        phases=_phases(episode, history, answer),
        steps_lost=lost,
        steps_lost_unsure=unsure,
        restored_step=answer.restored_step if answer else None,
        first_new_step=answer.first_new.step if answer and answer.first_new else None,
        decision=_decision(history, failure),
        nodes=nodes_hit(episode, homes(history.log)),
        clock_bound_s=history.log.clock_bound_s,
    )


def _steps_lost(
    history: History, answer: Recovery | None
) -> tuple[int, Literal["at most", "not known"] | None]:
    """The steps that were lost, and how much is known of it.

    Of a command whose steps are seen every so many it is the most that it can have lost: what was
    done after the last report before the failure is lost too, and the first report after it may be
    a whole distance behind where the job went on. One that comes first beyond all that was done
    before, as of a bar that is drawn late, says nothing.
    """
    if answer is None or answer.restored_step is None:
        return 0, None
    high, restored = answer.high_water, answer.restored
    grid = grid_of(history) if history.info.observed else 1
    if grid == 1 or restored is None or restored.cause != "restart":
        return max(0, high - answer.restored_step), None
    first = answer.restored_step + stride_of(history)
    if first > high + grid:
        return high, "not known"
    return max(0, high + grid - 1 - max(0, first - grid)), "at most"


def _acting_until(episode: Episode, history: History) -> int:
    """Until when a fault acted: its heal or the end of all its targets; 0 if over once done."""
    if episode.planned is None or not episode.planned.data.get("lasts"):
        return 0
    gone, end_ns = history.exited_ns, history.end_ns
    ends = [gone.get(process, end_ns) for process in episode.processes] or [end_ns]
    return min(max(ends), episode.healed.time_ns if episode.healed else end_ns)


def _evidence(episode: Episode) -> dict[str, object]:
    if episode.landed:
        evidence = episode.landed.data["evidence"]
        if not isinstance(evidence, dict):
            return {"seen": evidence}
        return {
            # as JSON can hold it: a planted NaN becomes text
            key: repr(v) if isinstance(v, float) and not math.isfinite(v) else v
            for key, v in evidence.items()
        }
    if episode.failed:
        return {"failed": episode.failed.data["reason"]}
    if episode.injected:
        return {}
    return {"planned": episode.planned.data["at"] if episode.planned else None}


def _seconds_between(start: Event, end_ns: int) -> float:
    return (end_ns - start.time_ns) / NS


def _detection(episode: Episode, outcome: Outcome, cut_short: bool) -> float | None:
    if episode.injected is None or outcome == "not-landed":
        return None
    if episode.failure:
        return _seconds_between(episode.injected, episode.failure.time_ns)
    return math.inf if outcome in ("hang", "sdc-escape") and not cut_short else None


def _recovery_time(
    episode: Episode, history: History, answer: Recovery | None, outcome: Outcome, *, bad: bool
) -> float | None:
    if outcome in ("hang", "fail-stop"):
        return None if history.cut_short else math.inf
    if bad:
        return math.inf
    if episode.injected is None or answer is None:
        return None
    if answer.first_new is not None:
        return _seconds_between(episode.injected, answer.first_new.committed_ns or 0)
    if episode.failure is None or not history.info.observed:
        return None
    again = at_the_end_again(history, episode.failure, answer.high_water)
    return None if again is None else _seconds_between(episode.injected, again)


def _decision(history: History, failure: Event | None) -> str:
    since = failure.time_ns if failure else math.inf
    decisions = (e for e in history.log.of(Kind.DECISION) if e.time_ns >= since)
    return next((str(event.data["reason"]) for event in decisions), "")


def _phases(episode: Episode, history: History, answer: Recovery | None) -> list[PhaseSpan]:
    injected, failure = episode.injected, episode.failure
    first = answer.first_new if answer else None
    if injected is None or failure is None or answer is None or first is None:
        return []
    end_ns, worked = first.committed_ns or 0, history.generation(first.generation)
    parked = (
        event.time_ns
        for kind in (Kind.SURVIVORS_PARKED, Kind.DECISION)  # the latter where they are not kept
        for event in history.log.of(kind)
        if failure.time_ns <= event.time_ns <= end_ns
    )
    redone = [
        run.committed_ns or 0
        for run in history.runs
        if run.step == answer.high_water
        and (run.committed_ns or 0) > failure.time_ns
        and (answer.restored_step or 0) < answer.high_water  # else it never fell below it
    ]
    marks = (
        failure.time_ns,
        next(parked, None),
        worked.grouped_ns if worked else None,
        (worked.stated_ns or worked.ready_ns) if worked else None,
        max(redone, default=None),
        end_ns,
    )
    spans: list[PhaseSpan] = []
    cursor = injected.time_ns
    for name, mark in zip(PHASE_NAMES, marks, strict=True):
        until = min(max(cursor, mark or cursor), end_ns)
        start = (cursor - injected.time_ns) / NS
        spans.append(PhaseSpan(name=name, start=start, seconds=(until - cursor) / NS))
        cursor = until
    return spans


def _short(episode: Episode, history: History) -> str:
    """Message if a command ended with fewer ranks than it started with, and one of the lost ranks
    was still seen at the fault; else "".
    """
    if not history.info.observed or episode.injected is None:
        return ""
    found, at = strength_of(history), episode.injected.time_ns
    return found.short if not found.gone or any(seen >= at for seen in found.gone.values()) else ""


def _outcome(
    episode: Episode,
    history: History,
    control: History | None,
    answer: Recovery | None,
    *,
    short: bool,
    harm: bool,
) -> Outcome:
    """``short``: whether a command ended with fewer ranks; ``harm``: see ``_harm``."""
    completed, others = history.outcome == "completed", episode.others
    if episode.injected is None or episode.landed is None:
        return "not-landed"
    if harm:
        return "sdc-escape"
    if answer is None:
        found = _undetected(episode, history, control)
        return "degraded" if short and found == "masked" else found
    if answer.first_new is not None or (short and completed):
        world = history.worked[-1].world if history.worked else 0
        full = not short if history.info.observed else world >= history.info.ranks
        return "recovered" if full else "degraded"
    if not completed:
        return "fail-stop" if history.outcome == "gave-up" else "hang"
    cause = episode.failure.data["cause"] if episode.failure else ""
    if cause in ANNOUNCED and not others and answer.restored is None:
        return "masked"  # only announced, and the job was over before the deadline
    return "recovered"  # the failure came so late that nothing new was left to commit


def _harm(episode: Episode, history: History) -> dict[str, object]:
    """The first step that a command reported with a non-finite loss after its values were
    corrupted, if the job went on from it without ever rolling it back: such harm is known without
    digests. After any other fault, only if it was the last one before and the job ended on
    non-finite losses.
    """
    if not history.info.observed or episode.landed is None:
        return {}
    lineage, after_ns = history.lineage, episode.injected.time_ns if episode.injected else 0
    bad = [
        event
        for event in history.reports
        if is_bad(event)
        and event.step in lineage
        and lineage[event.step or 0].generation == event.generation
    ]
    if not episode.corrupts:
        since = spoilt_since(history)
        ended = (e.time_ns for e in bad if since is not None and (e.step or 0) >= since)
        first = min(ended, default=None)
        hits = [event.time_ns for event in history.log.of(Kind.FAULT_INJECTED)]
        if first is None or any(event.time_ns <= after_ns for event in bad):
            return {}
        if any(after_ns < at < first for at in hits):
            return {}
    later = ((e.step or 0, str(float(e.data["loss"]))) for e in bad if e.time_ns > after_ns)
    step, loss = min(later, default=(None, ""))
    if step is None or (history.outcome != "completed" and max(lineage) <= step):
        return {}
    return {"committed_step": step, "committed_loss": loss}


def _undetected(episode: Episode, history: History, control: History | None) -> Outcome:
    after = episode.injected.time_ns if episode.injected else 0
    last = [run for run in history.runs if run.survives][-1:]
    went_on = history.outcome == "completed" or (
        not history.unfinished and any((run.committed_ns or 0) > after for run in last)
    )
    if not went_on:
        return "hang"
    wrong = episode.corrupts and control and not same_parameters(history, control)
    return "sdc-escape" if wrong else "masked"


def time_to_redundancy(
    history: History, injected: Event | None, incident: Incident
) -> float | None:
    """Seconds from the fault until a generation of all ranks is ready and as many ready processes
    wait as spares were provisioned.

    A process waits if it is ready, not a member of the generation at that time, and neither gone
    nor blamed for a failure. None if nothing was lost, or if a process that would have restored
    redundancy was still starting when the arm ended; infinity if the job went on, or ended, with
    fewer processes and none starting. A command's spares cannot be seen, so only the generation
    counts there.
    """
    if injected is None or incident.recovery_time is None:
        return None
    if incident.never_recovered:
        return math.inf
    log, spares = history.log, 0 if history.info.observed else history.info.spares
    came = [*log.of(Kind.PROCESS_READY)]
    went = [*log.of(Kind.PROCESS_EXITED, Kind.FAILURE_DETECTED)]
    since_ns = injected.time_ns
    ready = [g.ready_ns or g.started_ns for g in history.worked if g.started_ns > since_ns]
    first = min(ready, default=math.inf)
    for time_ns in sorted({*ready, *(e.time_ns for e in came if e.time_ns >= first)}):
        generation = history.generation_at(time_ns)
        if generation is None or generation.world < history.info.ranks:
            continue
        there, gone = (
            {e.data["process"] for e in events if e.time_ns <= time_ns} for events in (came, went)
        )
        if len(there - gone - {*generation.members}) >= spares:
            return (time_ns - since_ns) / NS
    settled = {e.data["process"] for e in (*came, *went) if not e.data.get("expected")}
    spawned = log.of(Kind.PROCESS_SPAWNED)
    starting = any(event.data["process"] not in settled for event in spawned)
    return None if history.cut_short or starting else math.inf


WORST = ("not-landed", "masked", "recovered", "degraded", "fail-stop", "hang", "sdc-escape")
"""Outcomes, the worst one last."""


def acts_of(history: History, episodes: Sequence[Episode]) -> list[tuple[Episode, ...]]:
    """Acts: what a fault does at once, to one target or many, is one incident.

    A fault that kills four ranks is injected four times, once for each, and the job answers
    once. Counted as four incidents it would have four values of every metric, three of which
    say little (``lost steps [27, 0, 0, 0]``), and bounds would be as narrow as if the job had
    been tried four times.

    Hits belong together if the injector logged them as one act (``act`` in ``fault_injected``)
    and the same generation met them. A target that was hit after the job had recovered from the
    other hits is a separate incident. In logs without ``act``, each hit is.

    The incident's costs are the act's, counted from its first hit:

    - ``detection_time``, ``recovery_time``, ``outcome``: the worst of its targets (recovered,
      degraded, fail-stop, hang, sdc-escape, in this order). A target without a failure is not
      worse than the others once the job gave up over their failures: no process was left to
      detect it.
    - ``phases``: of the target that took longest to recover; of several, the first one
      detected.
    - ``steps_lost``: of each rollback that answered it, once.
    - ``landed``, ``healed``: whether all hits were.
    """
    acts: dict[object, list[Episode]] = {}
    for index, episode in enumerate(episodes):
        key: object = (index,)
        injected = episode.injected
        if injected is not None and (act := injected.data.get("act")) is not None:
            key = (episode.fault, injected.generation, act)
        acts.setdefault(key, []).append(episode)
    return [tuple(hits) for hits in acts.values()]


def incidents_of(
    history: History, acts: Sequence[Sequence[Episode]], control: History | None
) -> tuple[Incident, ...]:
    """The incident of each act. The steps of a rollback that answered several are counted for the
    first: the others have no lost steps and name the incident that they were answered with.

    Incidents that end with the same new step were answered together.
    """
    first: dict[int, str] = {}
    counted = []
    for hits in acts:
        incident = _together(hits, history, control)
        step = incident.first_new_step
        if step is not None and step in first:
            more = {"steps_lost": 0, "answered_with": first[step]}
            incident = incident.model_copy(update=more)
        elif step is not None:
            first[step] = incident.fault
        counted.append(incident)
    return tuple(counted)


def _together(hits: Sequence[Episode], history: History, control: History | None) -> Incident:
    if len(hits) == 1:
        return incident_of(hits[0], history, control)
    each = [incident_of(replace(hit, injected=hits[0].injected), history, control) for hit in hits]
    outcome = outcome_of(each)
    # A target without a failure, in a job that ended over the others, has no times.
    timed = [
        one for one in each if one.outcome == outcome or one.detected_by or one.outcome != "hang"
    ]
    shown = max(timed, key=lambda one: (_length(one.recovery_time), -_length(one.detection_time)))
    rollbacks: dict[int | None, int] = {}
    for one in each:
        rollbacks[one.first_new_step] = max(rollbacks.get(one.first_new_step, 0), one.steps_lost)
    restored = [one.restored_step for one in each if one.restored_step is not None]
    detected = [one.detection_time for one in timed if one.detection_time is not None]
    return shown.model_copy(
        update={
            "occurrence": each[0].occurrence,
            "target": merged([hit.target for hit in hits]),
            "landed": all(one.landed for one in each),
            "healed": all(one.healed for one in each),
            "witness": ", ".join(dict.fromkeys(one.witness for one in each if one.witness)) or None,
            "evidence": merged([one.evidence for one in each]),
            "outcome": outcome,
            "detection_time": max(detected, default=None),
            "steps_lost": sum(rollbacks.values()),
            "restored_step": min(restored, default=None),
            "nodes": sorted({node for one in each for node in one.nodes}),
            "hits": [
                Hit(**{name: getattr(one, name) for name in Hit.model_fields}) for one in each
            ],
        }
    )


def outcome_of(each: Sequence[Incident]) -> str:
    """The outcome of an act by those of its targets; see the module."""
    ended = any(one.outcome == "fail-stop" and one.detected_by for one in each)
    due = [
        one.outcome for one in each if not (ended and one.outcome == "hang" and not one.detected_by)
    ]
    return max(due, key=WORST.index)


def merged(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several targets in one: a value that all share as it is, others as a list in the
    order of the hits.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [one[name] for one in facts if name in one]
        same = all(value == values[0] for value in values) and len(values) == len(facts)
        found[name] = values[0] if same else values
    return found


def _length(seconds: float | None) -> float:
    return -math.inf if seconds is None else seconds
