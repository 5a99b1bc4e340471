"""Incidents: what one hit of a fault cost, phase by phase, and how it ended (``acts``: hits of one
act together).

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.incident import PHASE_NAMES, Incident, Outcome, PhaseSpan
from trainchaos.harness.judge.measure.digests import same_parameters
from trainchaos.harness.judge.record.command_end import ended_ns
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import NS, Generation, History, StepRun
from trainchaos.harness.judge.record.nodes import homes, nodes_hit
from trainchaos.harness.judge.record.observed import grid_of, stride_of
from trainchaos.harness.judge.record.reported import is_bad, spoilt_since
from trainchaos.harness.judge.record.strength import strength_of
from trainchaos.harness.judge.record.sustained import at_the_end_again, lasting
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
    the job. ``acting_until_ns``: until when the fault behind it acted; see ``sustained``.
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
        found = lasting(history, number, mark, acting_until_ns=acting_until_ns, ended_ns=ended)
        first, mark = found.first, found.high_water
    answered = [g for g in later if first is None or g.number <= first.generation]
    lowest = min((g.resume_step for g in answered if g.resume_step is not None), default=None)
    return Recovery(
        high_water=mark,
        restored=later[0] if later else None,
        restored_step=lowest,
        first_new=first,
        concerns_job=failed is None or failure.data["process"] in (None, *failed.members),
    )


def _lost_at_most(
    history: History, answer: Recovery, lost: int
) -> tuple[int, Literal["at most", "not known"] | None]:
    """The most steps that a command can have lost, whose steps are seen every so many, and how much
    is known of it. What was done after the last report before the failure is lost too, and the
    first report after it may be a whole distance behind where the job went on. One that comes first
    beyond all that was done before, as of a bar that is drawn late, says nothing.
    """
    grid, high = grid_of(history), answer.high_water
    if grid == 1 or answer.restored is None or answer.restored.cause != "restart":
        return lost, None
    first = (answer.restored_step or 0) + stride_of(history)
    if first > high + grid:
        return high, "not known"
    return max(0, high + grid - 1 - max(0, first - grid)), "at most"


def incident_of(episode: Episode, history: History, control: History | None) -> Incident:
    """The incident of one episode. A fault that never fired gives one with occurrence -1 and
    outcome ``not-landed``.
    """
    injected, failure = episode.injected, episode.failure
    # of several failures (a node may take a spare and a rank along) the first that concerns the job
    acting_ns = _acting_until(episode, history)
    answers = (recovery_of(history, one, acting_ns) for one in episode.failures)
    concerned = next((answer for answer in answers if answer.concerns_job), None)
    phases = _phases(episode, history, concerned) if concerned and concerned.first_new else []
    restored = concerned.restored_step if concerned else None
    lost = max(0, concerned.high_water - restored) if concerned and restored is not None else 0
    unsure = None
    if history.info.observed and concerned is not None and concerned.restored is not None:
        lost, unsure = _lost_at_most(history, concerned, lost)
    short = _short(episode, history)
    outcome = _outcome(episode, history, control, concerned, short=bool(short))
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
        landed=episode.landed is not None,
        witness=str(episode.landed.data["witness"]) if episode.landed else None,
        evidence=_evidence(episode) | _harm(episode, history) | ranks,
        healed=episode.healed is not None,
        detected_by=str(failure.data["cause"]) if failure else None,
        blamed_rank=failure.data["rank"] if failure else None,
        detection_time=_detection(episode, outcome, history.cut_short),
        recovery_time=_recovery_time(
            episode, history, concerned, outcome, bad=bool(_harm(episode, history))
        ),
        outcome=outcome,
        phases=phases,
        steps_lost=lost,
        steps_lost_unsure=unsure,
        restored_step=restored,
        first_new_step=concerned.first_new.step if concerned and concerned.first_new else None,
        decision=_decision(history, failure),
        nodes=nodes_hit(episode, homes(history.log)),
        clock_bound_s=history.log.clock_bound_s,
    )


def _acting_until(episode: Episode, history: History) -> int:
    """Until when a fault acted: its heal or the end of all its targets; 0 if over once done."""
    if episode.planned is None or not episode.planned.data.get("lasts"):
        return 0
    gone, end_ns = history.exited_ns, history.end_ns
    ends = [gone.get(process, end_ns) for process in episode.processes] or [end_ns]
    return min(max(ends), episode.healed.time_ns if episode.healed else history.end_ns)


def _evidence(episode: Episode) -> dict[str, object]:
    if episode.landed:
        evidence = episode.landed.data["evidence"]
        return (
            {k: _plain(v) for k, v in evidence.items()}
            if isinstance(evidence, dict)
            else {"seen": evidence}
        )
    if episode.failed:
        return {"failed": episode.failed.data["reason"]}
    return (
        {}
        if episode.injected
        else {"planned": episode.planned.data["at"] if episode.planned else None}
    )


def _plain(value: object) -> object:
    """The value as JSON can hold it: a planted NaN becomes text."""
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _seconds_between(start: Event, end_ns: int) -> float:
    return (end_ns - start.time_ns) / NS


def _detection(episode: Episode, outcome: Outcome, cut_short: bool) -> float | None:
    if episode.injected is None or outcome == "not-landed":
        return None
    if episode.failure:
        return _seconds_between(episode.injected, episode.failure.time_ns)
    return math.inf if outcome in ("hang", "sdc-escape") and not cut_short else None


def _recovery_time(
    episode: Episode, history: History, recovery: Recovery | None, outcome: Outcome, *, bad: bool
) -> float | None:
    if outcome in ("hang", "fail-stop"):
        return None if history.cut_short else math.inf
    if bad:
        return math.inf
    if episode.injected is None or recovery is None:
        return None
    if recovery.first_new is not None:
        return _seconds_between(episode.injected, recovery.first_new.committed_ns or 0)
    if episode.failure is None or not history.info.observed:
        return None
    again = at_the_end_again(history, episode.failure, recovery.high_water)
    return None if again is None else _seconds_between(episode.injected, again)


def _decision(history: History, failure: Event | None) -> str:
    if failure is None:
        return ""
    decisions = (e for e in history.log.of(Kind.DECISION) if e.time_ns >= failure.time_ns)
    return next((str(event.data["reason"]) for event in decisions), "")


def _phases(episode: Episode, history: History, recovery: Recovery) -> list[PhaseSpan]:
    injected, failure, first = episode.injected, episode.failure, recovery.first_new
    if injected is None or failure is None or first is None or first.committed_ns is None:
        return []
    worked = history.generation(first.generation)
    stated = (worked.stated_ns or worked.ready_ns) if worked else None
    grouped = worked.grouped_ns if worked else None
    marks = (
        failure.time_ns,
        _aborted_ns(history, failure, first.committed_ns),
        grouped,
        stated,
        _redone_ns(history, recovery, failure.time_ns),
        first.committed_ns,
    )
    spans: list[PhaseSpan] = []
    cursor = injected.time_ns
    for name, mark in zip(PHASE_NAMES, marks, strict=True):
        until = min(max(cursor, mark or cursor), first.committed_ns)
        start = (cursor - injected.time_ns) / NS
        spans.append(PhaseSpan(name=name, start=start, seconds=(until - cursor) / NS))
        cursor = until
    return spans


def _aborted_ns(history: History, failure: Event, before_ns: int) -> int | None:
    """When the survivors had parked; the time of the decision if they are not kept."""
    for kind in (Kind.SURVIVORS_PARKED, Kind.DECISION):
        for event in history.log.of(kind):
            if failure.time_ns <= event.time_ns <= before_ns:
                return event.time_ns
    return None


def _redone_ns(history: History, recovery: Recovery, after_ns: int) -> int | None:
    """When the job had committed its old highest step again; None if it never fell below it."""
    if recovery.restored_step is None or recovery.restored_step >= recovery.high_water:
        return None
    redone = [
        run.committed_ns
        for run in history.runs
        if run.step == recovery.high_water
        and run.committed_ns is not None
        and run.committed_ns > after_ns
    ]
    return max(redone, default=None)


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
    recovery: Recovery | None,
    *,
    short: bool,
) -> Outcome:
    """``short``: whether a command ended with fewer ranks."""
    if episode.injected is None or episode.landed is None:
        return "not-landed"
    if _harm(episode, history):
        return "sdc-escape"
    if recovery is None:
        found = _undetected(episode, history, control)
        return "degraded" if short and found == "masked" else found
    if recovery.first_new is not None or (short and history.outcome == "completed"):
        world = history.worked[-1].world if history.worked else 0
        full = not short if history.info.observed else world >= history.info.ranks
        return "recovered" if full else "degraded"
    if history.outcome == "completed" and _only_notified(episode) and recovery.restored is None:
        return "masked"  # the job was over before the deadline
    if history.outcome == "completed":
        # the failure came so late that nothing new was left to commit
        return "recovered"
    return "fail-stop" if history.outcome == "gave-up" else "hang"


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
    since = spoilt_since(history)
    if not episode.corrupts and not _last_before(history, after_ns, bad, since):
        return {}
    found = min(
        ((e.step or 0, str(float(e.data["loss"]))) for e in bad if e.time_ns > after_ns),
        default=None,
    )
    if found is None or (history.outcome != "completed" and max(lineage) <= found[0]):
        return {}
    return {"committed_step": found[0], "committed_loss": found[1]}


def _last_before(history: History, after_ns: int, bad: Sequence[Event], since: int | None) -> bool:
    """Whether a job ended on non-finite losses, and the fault injected at ``after_ns`` was the last
    one before them.
    """
    first = min(
        (e.time_ns for e in bad if since is not None and (e.step or 0) >= since), default=None
    )
    if first is None or any(event.time_ns <= after_ns for event in bad):
        return False
    return not any(
        after_ns < event.time_ns < first for event in history.log.of(Kind.FAULT_INJECTED)
    )


def _only_notified(episode: Episode) -> bool:
    """Whether nothing was lost: a process gave notice of its end, or was said to fail soon, and no
    failure followed.
    """
    return (
        episode.failure is not None
        and episode.failure.data["cause"] in ANNOUNCED
        and not episode.others
    )


def _undetected(episode: Episode, history: History, control: History | None) -> Outcome:
    after = episode.injected.time_ns if episode.injected else 0
    went_on = history.outcome == "completed" or any(
        (r.committed_ns or 0) > after for r in _last_runs(history)
    )
    if not went_on:
        return "hang"
    corrupt = episode.corrupts
    return (
        "sdc-escape" if corrupt and control and not same_parameters(history, control) else "masked"
    )


def _last_runs(history: History) -> list[StepRun]:
    """The final step run; empty if the job gave up or timed out: it did not go on then."""
    runs = [run for run in history.runs if run.survives]
    return runs[-1:] if history.outcome not in ("timed-out", "gave-up") else []
