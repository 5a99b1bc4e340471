"""Classifies the outcome of a job after a fault from its event log, with evidence in words. Pure.

The classes are ``model.OutcomeClass``. They are tried from the worst to the best, so that a job
that both rolled back and lost a rank is ``degraded``. The evidence is the same for every stack:
reported steps, losses, samples and ranks, and ended processes.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.compare.result.model import FOR_EVER, OutcomeClass
from trainchaos.harness.judge.incident import Incident, PhaseSpan
from trainchaos.harness.judge.measure.measure import ArmMeasures
from trainchaos.harness.judge.record.history import NS, History

STOOD_STILL = 5.0  # times the usual gap between steps; a shorter gap is not an interruption
SHORTEST_STOP_S = 0.1
UNUSUAL = (
    2.0  # times the usual gap between steps; a longer gap after a failure belongs to its recovery
)
SOON_STEPS = 10.0  # a stop caused by the fault begins within this many usual steps after it
SPOILT_LOSS = 1.2  # times the control's loss: the restored state is not the saved one
SPOILT_STEPS = 10
CORRUPTS_STATE = ("checkpoint-corrupt", "tensor-corrupt", "data-corrupt", "replica-desync")
TELLING = re.compile(r"(Error|Exception)\b|\bsignal\b|\bSIG[A-Z]+\b", re.ASCII)
"""Matches a line of output that says why a program ended."""


def judged(measures: ArmMeasures, control: History | None) -> dict[str, Any]:
    """How a faulted arm ended, as fields of ``model.Trial``. ``control``: the same stack and seed
    without a fault.
    """
    history = measures.history
    incidents = [incident for incident in measures.incidents if incident.outcome != "not-landed"]
    missed = [incident for incident in measures.incidents if not incident.landed]
    if not incidents or (missed and completed(history)):
        why = f"the job ended first: {ended(history)}"
        if completed(history) and missed:
            said = (f"{key}: {value}" for key, value in missed[0].evidence.items())
            why = f"{missed[0].fault}: {', '.join(said) or 'it did not fire'}"
        return {"outcome": "not landed", "witness": why}
    injected_ns = history.start_ns + round(min(one.injected_s for one in incidents) * NS)
    outcome, witness = _class(history, control, incidents, injected_ns)
    for_good = outcome == "degraded"
    stops = [(one, _time_of(history, one, incidents, for_good=for_good)) for one in incidents]
    slowest, recovery = max(stops, key=lambda pair: -1.0 if pair[1] is None else pair[1])
    if outcome in FOR_EVER:
        recovery = math.inf
    elif outcome == "masked" and recovery is not None:
        outcome = "recovered"
        witness = f"no step for a while after the fault, then new ones: {witness}"
    lost, unknown = samples_lost(history) if outcome not in FOR_EVER else (None, "")
    detection = None if outcome == "masked" else _reaction(history, slowest, recovery)
    if outcome == "committed bad values":
        detection = math.inf
    note = ""
    if recovery not in (None, math.inf) and slowest.recovery_time is None:
        note = (
            "no failure was seen from outside; its recovery is the time that training stood still"
        )
    elif detection is None and recovery is not None:
        note = (
            "nothing was seen from outside between the fault and the first new step, so its phases"
            " are one"
        )
    return {
        "outcome": outcome,
        "witness": witness,
        "recovery": recovery,
        "detection": detection,
        "phases": _phases(slowest, detection, recovery) if outcome not in FOR_EVER else [],
        "steps_lost": len(redone(history, injected_ns)),
        "samples_lost": lost,
        "note": "; ".join(filter(None, (note, unknown))),
    }


def completed(history: History) -> bool:
    """Whether the last step was reached, even if the command did not end after it."""
    return history.outcome == "completed" or history.committed_step >= history.info.steps


def ended(history: History) -> str:
    """How the arm ended, with the last line that the command printed."""
    reason = str(history.finished.data["reason"]) if history.finished else "the log has no end"
    first, _, rest = reason.partition("\n")
    lines = [
        line.strip(" |") for line in rest.splitlines() if any(letter.isalpha() for letter in line)
    ]
    telling = [line for line in lines if TELLING.search(line)] or lines
    if not telling or not first.endswith(":"):
        return first or history.outcome
    return f"{first.rpartition('; ')[0]}: {telling[-1]}"


def _class(
    history: History, control: History | None, incidents: Sequence[Incident], injected_ns: int
) -> tuple[OutcomeClass, str]:
    if bad := _bad_values(history, control, incidents, injected_ns):
        return "committed bad values", bad
    if not completed(history):
        how: OutcomeClass = "all ranks died" if history.outcome == "gave-up" else "hung"
        return how, f"{ended(history)}; last step {history.committed_step} of {history.info.steps}"
    before = [run.step for run in history.runs if (run.committed_ns or math.inf) <= injected_ns]
    over = any(one.restored_step == 0 for one in incidents) or any(
        event.time_ns > injected_ns and (event.step or 0) <= 1 and event.data["rank"] is not None
        for event in history.log.of(Kind.STEP_REPORTED)
    )
    if over and max(before, default=0) > 2:
        return "started over", f"it began with step 1 again; step {max(before)} had been reached"
    degraded = next((one for one in incidents if one.outcome == "degraded"), None)
    if degraded is not None:
        last = f"{history.worked[-1].world} of {history.info.ranks} ranks in the last generation"
        return "degraded", str(degraded.evidence.get("ranks", last))
    if again := redone(history, injected_ns):
        many = f"{len(again)} steps from {again[0]} to {again[-1]} were"
        which = f"step {again[0]} was" if len(again) == 1 else many
        return "rolled back", f"{which} done again"
    seen = next((one for one in incidents if one.recovery_time is not None), None)
    if seen is not None:
        who = "a rank" if seen.blamed_rank is None else f"rank {seen.blamed_rank}"
        return "recovered", (
            f"{who} was seen to fail ({seen.detected_by}); no step was done again, the first new"
            f" one was {seen.first_new_step}"
        )
    return "masked", f"all {history.info.steps} steps were reported, and no failure"


def _bad_values(
    history: History, control: History | None, incidents: Sequence[Incident], injected_ns: int
) -> str:
    """Evidence that a corrupted state was trained on to the end; empty: none was seen."""
    escaped = next((one for one in incidents if one.outcome == "sdc-escape"), None)
    if escaped is not None and "committed_step" in escaped.evidence:
        step, loss = (escaped.evidence[f"committed_{name}"] for name in ("step", "loss"))
        return f"step {step} was reported with loss {loss}, and was never redone"
    if escaped is not None:
        return f"{escaped.fault}: the state differs from the control's, and nothing detected it"
    after = [run for run in history.lineage.values() if run.end_ns > injected_ns]
    if control is None or not any(one.kind in CORRUPTS_STATE for one in incidents):
        return ""
    theirs = {step: run.loss for step, run in control.lineage.items() if math.isfinite(run.loss)}
    pairs = [
        (run.step, run.loss, theirs[run.step])
        for run in after
        if run.generation > 1 and run.step in theirs and math.isfinite(run.loss)
    ][:SPOILT_STEPS]
    ratios = [mine / other for _, mine, other in pairs if other > 0]
    if len(ratios) == SPOILT_STEPS and statistics.median(ratios) > SPOILT_LOSS:
        step, mine, other = pairs[0]
        return (
            f"after it went on from the corrupted checkpoint, the loss at step {step} was"
            f" {mine:.4g} where the control's was {other:.4g}; median of {SPOILT_STEPS} steps"
            f" {statistics.median(ratios):.3g} times as large"
        )
    return ""


def _time_of(
    history: History, incident: Incident, all_: Sequence[Incident], *, for_good: bool
) -> float | None:
    """Seconds from the fault to the end of the standstill it caused, which is a new step; None:
    there was no standstill.

    If a failure was seen, ``Incident.recovery_time`` is an upper bound: it ends with the first new
    step of a generation formed after the failure, but from outside a spare is seen only once it
    reports, some steps after it joined. Within that time, the standstill ends with the last
    unusually long gap between two new steps; redone steps are not new. If no failure was seen, only
    a stop of several usual steps counts that begins soon after the fault and before the next one;
    or, if a rank was lost ``for_good``, the longest such gap, as the others had to continue without
    it.
    """
    injected_ns = history.start_ns + round(incident.injected_s * NS)
    gaps = list(itertools.pairwise(_advances(history)))
    usual = statistics.median([(after - before) / NS for before, after in gaps] or [0.0])
    seen = incident.recovery_time
    if seen is not None and math.isinf(seen):
        return seen
    later_s = (one.injected_s for one in all_ if one.injected_s > incident.injected_s)
    next_ns = history.start_ns + min((second * NS for second in later_s), default=math.inf)
    begun_ns = math.inf if seen is not None else injected_ns + SOON_STEPS * usual * NS
    ended_ns = next_ns if seen is None else injected_ns + seen * NS + 1
    mine = [
        ((after - before) / NS, after)
        for before, after in gaps
        if after > injected_ns and before <= begun_ns and after <= ended_ns
    ]
    least = max(STOOD_STILL * usual, SHORTEST_STOP_S) if seen is None else UNUSUAL * usual
    long = [end for length, end in mine if length > least]
    if not long and (not mine or (seen is None and not for_good)):
        return seen
    end = max(long) if long else max(mine)[1]
    return (end - injected_ns) / NS


def _reaction(history: History, incident: Incident, recovery: float | None) -> float | None:
    """Seconds from the fault to the first visible reaction: a process ends (other than by the
    fault) or starts, a new generation begins, or the command ends. None: no reaction before the
    recovery; infinity: no reaction and no recovery.
    """
    injected_ns = history.start_ns + round(incident.injected_s * NS)
    kinds = (Kind.PROCESS_EXITED, Kind.PROCESS_SPAWNED, Kind.GENERATION_STARTED, Kind.COMMAND_ENDED)
    later = (event for event in history.log.of(*kinds) if event.time_ns > injected_ns)
    first = next((event for event in later if not _is_no_answer(event, incident)), None)
    after_s = math.inf if first is None else (first.time_ns - injected_ns) / NS
    if recovery == math.inf or (recovery is not None and after_s < recovery):
        return after_s
    return None


def _is_no_answer(event: Event, incident: Incident) -> bool:
    """Whether a process's end is not a reaction: the fault or the harness ended it, or it
    succeeded. The end of a stopped process is always a reaction.
    """
    if event.data.get("expected") or event.data.get("asked") or event.data.get("exit_code") == 0:
        return True
    if event.kind is not Kind.PROCESS_EXITED or "stop" in incident.kind:
        return False
    hit = incident.target.get("process") or incident.target.get("processes")
    return event.data["process"] == hit or (isinstance(hit, list) and event.data["process"] in hit)


def _phases(incident: Incident, detection: float | None, recovery: float | None) -> list[PhaseSpan]:
    """The incident's phases. The first ends with the first visible reaction, as the time at which
    our own observer noticed is not a property of the stack; the last ends with the recovery. If
    they cannot be separated, there is only one.
    """
    if recovery is None:
        return []
    if detection is None or not incident.phases:
        return [PhaseSpan(name="regroup", start=0.0, seconds=recovery)]
    ends = [min(span.start + span.seconds, recovery) for span in incident.phases[:-1]] + [recovery]
    ends[0] = min(detection, recovery)
    spans, cursor = [], 0.0
    for span, end in zip(incident.phases, ends, strict=True):
        until = max(cursor, end)
        spans.append(PhaseSpan(name=span.name, start=cursor, seconds=until - cursor))
        cursor = until
    return spans


def redone(history: History, injected_ns: int) -> list[int]:
    """Steps that had been done and were done again after the fault, in order, each once.

    If ranks are known, a step counts if all members of a generation had reported it (the condition
    for a commit everywhere in this project) and most of a later generation report it again. A step
    does not count if only the lost rank had finished it, or if some ranks finished it before a
    spare joined and the others after: from outside a spare may be seen some steps after it joined,
    so the rest of a step is then reported by a generation that did not begin with it.
    """
    reports = history.log.of(Kind.STEP_REPORTED)
    if not history.info.observed or any(event.data["rank"] is None for event in reports):
        lost = {r.step for r in history.runs if not r.survives and r.committed_ns is not None}
        ends = {step: run.end_ns for step, run in history.lineage.items()}
        return sorted(step for step in lost if ends.get(step, 0) > injected_ns)
    worlds = {generation.number: generation.world for generation in history.generations}
    ranks: dict[tuple[int, int], set[int]] = {}
    whole: dict[int, int] = {}
    again: set[int] = set()
    for event in history.log.of(Kind.STEP_REPORTED):
        step, number = event.step or 0, event.generation
        reporters = ranks.setdefault((number, step), set())
        reporters.add(int(event.data["rank"]))
        world = worlds.get(number, math.inf)
        if (
            event.time_ns > injected_ns
            and whole.get(step, number) < number
            and 2 * len(reporters) > world
        ):
            again.add(step)
        if len(reporters) >= world:
            whole.setdefault(step, number)
    return sorted(again)


def _advances(history: History) -> list[int]:
    """Times at which a new highest step was done, in ns, in order."""
    times, high = [], 0
    for run in sorted(
        (r for r in history.runs if r.committed_ns is not None),
        key=lambda r: (r.committed_ns or 0, r.step),
    ):
        if run.step > high:
            high = run.step
            times.append(run.committed_ns or 0)
    return times


def samples_lost(history: History) -> tuple[int | None, str]:
    """(number of samples of the global batches that no rank reported as trained, or why that is
    unknown).

    In an observed job, each rank must report its own samples. The samples of a rank lost in a step
    that others completed count as trained: others complete a step only after its all-reduce, which
    includes every member's gradients.
    """
    info = history.info
    if not info.observed:
        return None, "counted by the checker of the built-in workload"
    reports: dict[int, list[Event]] = {}
    for event in history.log.of(Kind.STEP_REPORTED):
        if event.data["rank"] is None or event.data["samples"] is None:
            return None, "its ranks do not report their samples"
        reports.setdefault(event.step or 0, []).append(event)
    died, again = _died_in(history), set(redone(history, 0))
    lost = 0
    for step, run in history.lineage.items():
        mine = [
            e for e in reports.get(step, ()) if step not in again or e.generation == run.generation
        ]
        shares = {int(event.data["rank"]): int(event.data["samples"]) for event in mine}
        missing = max(0, info.global_batch - sum(shares.values()))
        lost += 0 if step in died else missing
    return lost, ""


def _died_in(history: History) -> set[int]:
    """Steps in which a member was lost: the first step it did not report. Its rank number may be
    reused afterwards.
    """
    found = set()
    for lost, rank in _losses(history):
        mine = [
            event.step or 0
            for event in history.log.of(Kind.STEP_REPORTED)
            if event.generation == lost.generation
            and event.data["rank"] == rank
            and event.time_ns < lost.time_ns
        ]
        found.add(max(mine, default=0) + 1)
    return found


def _losses(history: History) -> Iterator[tuple[Event, int | None]]:
    """Each failure, and each unexpected end of a member, with its rank: of one that ends as the
    others do the last step, no failure is declared, as the job is over.
    """
    for event in history.log.of(Kind.FAILURE_DETECTED, Kind.PROCESS_EXITED):
        if event.kind is Kind.FAILURE_DETECTED:
            yield event, event.data["rank"]
            continue
        generation = history.generation(event.generation)
        rank = generation.ranks.get(event.data["process"]) if generation is not None else None
        if rank is not None and not event.data["expected"]:
            yield event, rank
