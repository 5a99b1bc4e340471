"""What a command kept through its faults: its progress and its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.sla import Clause, evaluate, parse_clause
from trainchaos.harness.judge.checkers.job.observed import progress
from trainchaos.harness.judge.checkers.job.values import LEAVE_OUT
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, unknown
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.observed import stride_of, unseen
from trainchaos.harness.judge.record.strength import half_known, strength_of
from trainchaos.harness.judge.results import Finding

FEW = 2  # steps; losing no more than these is not worth reporting


def kept_progress(evidence: Evidence) -> Finding | None:
    """After a fault the job did not restart from its first step. None if it never went back, or if
    its steps are unknown. An SLA that admits as many lost steps as had been done allows it. Where
    the control arm did the same without a fault, it is not known to be the fault's doing.
    """
    history, limits = evidence.history, _limits(evidence)
    hit = min((event.time_ns for event in evidence.log.of(Kind.FAULT_INJECTED)), default=None)
    if evidence.is_control or hit is None or progress(evidence).verdict != "pass":
        return None
    stride, back, where = stride_of(history), 0, "never to its first step"
    for generation in history.worked:
        done = history.high_water(generation.number - 1)
        if (
            generation.started_ns < hit
            or generation.resume_step is None
            or generation.resume_step >= done
        ):
            continue
        back += 1
        if generation.resume_step > 0 or done < max(FEW + 1, 2 * stride):
            continue
        if limits and all(evaluate(clause, [float(done)])[0] for clause in limits):
            where = f"to its first step after {done} steps, which sla.steps_lost allows"
            continue
        cure = _cure(limits)
        mine = (e for e in evidence.log.of(Kind.STEP_REPORTED) if e.generation == generation.number)
        reported = min(event.step or 0 for event in mine)
        if reported <= 1:
            again = f"the job began again from step 1, and {done} steps had been done"
            if (control := evidence.control_history) is not None and _begins_again(control):
                return unknown(
                    f"{again}; the control arm began again too, without a fault: correct the"
                    " command first, until it ends well without one"
                )
            return failed(f"after a fault {again}: {cure}")
        return unknown(
            f"{done} steps had been done, and the first one reported after a restart was"
            f" {reported}: whether the job began again from step 1 is not known; {cure}"
        )
    return passed(f"the job went back {back} times, {where}") if back else None


def _begins_again(history: History) -> bool:
    """Whether a job left more than a few steps behind and began from its first one."""
    few = max(FEW + 1, 2 * stride_of(history))
    return any(
        one.resume_step == 0 and history.high_water(one.number - 1) >= few for one in history.worked
    )


def _limits(evidence: Evidence) -> list[Clause]:
    """The clauses that say how many steps may be lost at most."""
    scenario = evidence.cell.scenario
    checks = [one for one in scenario.sla.get("steps_lost", ()) if one.covers(scenario.faults)]
    clauses = [parse_clause(check.check, "steps") for check in checks]
    return [clause for clause in clauses if not clause.op.startswith(">")]


def _cure(limits: Sequence[Clause]) -> str:
    said = (
        f"sla.steps_lost allows fewer, {limits[0].text}"
        if limits
        else "say how many may be lost, sla: {steps_lost: [...]}"
    )
    return f"{said}{LEAVE_OUT.format('kept-progress')}"


def full_strength(evidence: Evidence) -> Finding:
    """The job ended with as many ranks as it started with."""
    history = evidence.history
    if not history.info.observed:
        world = history.worked[-1].world if history.worked else 0
        if not history.worked:
            return unknown("no generation was ever ready")
        witness = f"the last generation had {world} of {history.info.ranks} ranks"
        return passed(witness) if world >= history.info.ranks else failed(witness)
    if not history.runs:
        return unknown(unseen(history))
    found = strength_of(history)
    if lacking := half_known(history):
        return unknown(f"{lacking}: how many there were at the end is not known")
    return (
        failed(found.short)
        if found.short
        else passed(f"{found.ended} of {found.began} ranks at the end")
    )
