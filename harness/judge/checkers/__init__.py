"""Invariants: pure functions of one arm's evidence, each answering pass, fail with a witness, or
inconclusive. They see nothing of records that are not whole (``record/whole.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, TypeVar

from trainchaos.chaos.events.log import ORCHESTRATOR
from trainchaos.chaos.scenario.model import RETIRED_INVARIANTS, InvariantExclusion
from trainchaos.harness.judge.checkers.faults.identity import identity
from trainchaos.harness.judge.checkers.faults.landing import landing
from trainchaos.harness.judge.checkers.faults.noticed import detection, expectations, fault_landed
from trainchaos.harness.judge.checkers.faults.promised import alarms, rejoins
from trainchaos.harness.judge.checkers.job import (
    checkpoints,
    data,
    leftovers,
    liveness,
    loss,
    observed,
    values,
    world,
)
from trainchaos.harness.judge.checkers.job.ending import ending, recovery_shown
from trainchaos.harness.judge.evidence.evidence import Checker, Evidence, some, unknown
from trainchaos.harness.judge.record.commands import half_known
from trainchaos.harness.judge.record.whole import broken, whole
from trainchaos.harness.judge.results import Finding

_Found = TypeVar("_Found", Finding, Finding | None)
CHECKERS: Mapping[str, Checker] = MappingProxyType(
    {
        "fault-landed": fault_landed,
        "landing": landing,
        "sample-accounting": data.sample_accounting,
        "no-lost-commit": checkpoints.no_lost_commit,
        "single-writer": checkpoints.single_writer,
        "replica-equality": world.replica_equality,
        "loss-equality": loss.loss_equality,
        "checkpoint-integrity": checkpoints.checkpoint_integrity,
        "nan-containment": data.nan_containment,
        "detection": detection,
        "liveness": liveness.liveness,
        "membership": world.membership,
        "step-arithmetic": data.step_arithmetic,
        "recovery-shown": recovery_shown,
        "identity": identity,
        "ending": ending,
        "no-orphans": leftovers.no_orphans,
        "evidence-complete": leftovers.evidence_complete,
    }
)
OF_COMMANDS: Mapping[str, Callable[[Evidence], Finding | None]] = MappingProxyType(
    {"finite-losses": values.finite_losses, "kept-progress": observed.kept_progress}
)
"""Run on every command, unless its scenario leaves them out by name. None: no finding to report."""
BY_NAME: Mapping[str, Checker] = MappingProxyType({"full-strength": observed.full_strength})
"""Run only where a scenario lists them: a job may be meant to go on with fewer ranks."""
NAMES = (*CHECKERS, *OF_COMMANDS, *BY_NAME)
"""Every name that a scenario may list."""
_ALL = {**CHECKERS, **BY_NAME}
OTHERWISE_OF_COMMANDS: Mapping[str, Checker] = MappingProxyType(
    {"loss-equality": values.loss_equality, "no-orphans": leftovers.of_a_command}
)
"""Checkers of a command that replace the one of the same name: a command leaves other evidence."""
OF_SUPERVISOR = ("identity", "no-orphans")
"""Those that need the supervisor's record alone. All others need those of the ranks too."""
ALWAYS = "fault-landed"
EXPECTATION = "expectation"
ALARMS = "alarms"
PREFLIGHT = "preflight"
FINISHED = "finished"
STEADY_STATE = "steady-state"

__all__ = ["Checker", "Evidence", "check", "check_all", "names_of"]


def names_of(
    invariants: Literal["default", "observable"] | Sequence[str] | InvariantExclusion,
) -> list[str]:
    """Names of the checkers that a scenario selects; ``default`` selects all, and so does
    ``observable``, of which a command lacks some. Raises KeyError for an unknown name.

    A non-empty selection always includes ``fault-landed``: without it the others prove nothing.
    """
    if invariants in ("default", observed.OBSERVABLE):
        return list(CHECKERS)
    if isinstance(invariants, InvariantExclusion):
        return [name for name in CHECKERS if name == ALWAYS or name not in invariants.leave_out]
    unknown_names = [name for name in invariants if name not in (*NAMES, *RETIRED_INVARIANTS)]
    if unknown_names:
        raise KeyError(", ".join(unknown_names))
    aside = (ALWAYS, *OF_COMMANDS, *RETIRED_INVARIANTS)
    listed = [name for name in invariants if name not in aside]
    return [ALWAYS, *listed] if invariants else []


def check(checker: Callable[[Evidence], _Found], evidence: Evidence) -> Finding | _Found:
    """Run one checker on the part of the record that is whole. Inconclusive where it needs another
    part, and where it raises.
    """
    lost = broken(evidence.log)
    alone = any(checker is CHECKERS[name] for name in OF_SUPERVISOR)
    needed = lost.keys() & {ORCHESTRATOR} if alone else lost.keys()
    if needed:
        return unknown(f"the record is not whole: {some([lost[name] for name in sorted(needed)])}")
    try:
        return checker(replace(evidence, log=whole(evidence.log)) if lost else evidence)
    except Exception as error:
        return unknown(f"the checker could not work on this log: {type(error).__name__}: {error}")


def _of_a_command(name: str, evidence: Evidence) -> Finding:
    if name in observed.LACKING:
        return observed.lacking(name)
    found = check(OTHERWISE_OF_COMMANDS.get(name, _ALL[name]), evidence)
    if name != "detection" or found.verdict != "fail":
        return found
    without = evidence.history if evidence.is_control else evidence.control_history
    if without is not None and without.unfinished:
        return unknown(f"the command fails without any fault: {found.witness}")
    return _of_half_the_ranks(found, evidence)


def _of_half_the_ranks(found: Finding, evidence: Evidence) -> Finding:
    """The finding; inconclusive instead of fail where not all ranks were found, because targets and
    blame then prove nothing.
    """
    lacking = half_known(evidence.history) if found.verdict == "fail" else ""
    return unknown(f"{lacking}, so that this proves nothing: {found.witness}") if lacking else found


def check_all(evidence: Evidence) -> dict[str, Finding]:
    """Run every checker that the cell selects, and check the faults' expected outcomes.

    The findings always include whether the job finished: in ``liveness`` or as ``finished``.
    """
    scenario, faulted = evidence.cell.scenario, not evidence.is_control
    names, asked = names_of(scenario.invariants), scenario.invariants
    findings: dict[str, Finding | None]
    if evidence.history.info.observed:
        findings = {observed.PROGRESS: check(observed.progress, evidence)}
        if asked == observed.OBSERVABLE:
            names = [name for name in names if name not in observed.LACKING]
        findings |= {name: _of_a_command(name, evidence) for name in names}
        left_out = asked.leave_out if isinstance(asked, InvariantExclusion) else ()
        always = {name: one for name, one in OF_COMMANDS.items() if name not in left_out}
        findings |= {name: check(checker, evidence) for name, checker in always.items()}
    else:
        findings = {name: check(_ALL[name], evidence) for name in names}
    if "liveness" not in findings:
        findings[FINISHED] = check(liveness.finished, evidence)
    expected = [fault.expect for fault in scenario.faults]
    if faulted and any(one.outcome or one.blame for one in expected):
        findings[EXPECTATION] = _of_half_the_ranks(check(expectations, evidence), evidence)
    if any(one.alarm for one in expected):
        findings[ALARMS] = check(alarms, evidence)
    if faulted and any(one.preflight for one in expected):
        findings[PREFLIGHT] = check(rejoins, evidence)
    if faulted and scenario.steady_state:
        findings[STEADY_STATE] = check(liveness.steady_state, evidence)
    return {name: finding for name, finding in findings.items() if finding is not None}
