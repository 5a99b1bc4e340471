"""Invariants on the losses that a command reports, the only part of its state that is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, unknown
from trainchaos.harness.judge.record.commands import (
    LAST,
    gradients_spoilt_since,
    losses_before,
    losses_of,
    spoilt_since,
    unread_of,
)
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.results import Finding

NOT_RESTORED = (
    "so had this one before the fault, so that the script is deterministic; it may not restore all"
    " that it goes on with: the optimizer, random numbers, its place in the data"
)
MISSING = 3
"""Losses, by their usual distance, that are missing where they stop coming."""
LEAVE_OUT = "; leave it out by saying so, invariants: {{leave_out: [{}]}}"


def finite_losses(evidence: Evidence) -> Finding | None:
    """The job did not end on non-finite losses. One that could not be read, such as a line that two
    ranks wrote at once, leaves that open only among the steps by which it is judged; losses that
    stop coming leave it open too. None if no loss was reported.
    """
    history, losses = evidence.history, losses_of(evidence.history)
    escapes = [] if evidence.is_control else evidence.expects("sdc-escape")
    since = spoilt_since(history)
    if since is not None:
        last = [value for found in losses[max(losses)].values() for value in found]
        what = next((value for value in last if not math.isfinite(value)), math.nan)
        said = (
            f"the job ended on losses that are not numbers: {what} at step {max(losses)}, from step"
            f" {since} on"
        )
        more = f", as {escapes[0]} is expected to make it" if escapes else ""
        return passed(said + more) if escapes else failed(said)
    stopped = _stopped(history, list(losses))
    if (spoilt := gradients_spoilt_since(history)) is not None:
        more = f"; {stopped}" if stopped else ""
        said = f"the norm of the gradients is not a number from step {spoilt} to the end{more}"
        return passed(f"{said}, as {escapes[0]} may make it") if escapes else failed(said)
    if stopped:
        return unknown(_unread(history, since=max(losses) + 1) or stopped)
    judged = list(losses)[-LAST:]
    if lacking := _unread(history, since=judged[0] if len(judged) == LAST else 0):
        return unknown(lacking)
    if not losses:
        return None
    unread = unread_of(history).get("loss")
    torn = f"; {unread[0]} could not be read, such as {unread[1]!r}" if unread else ""
    return passed(f"losses of {len(losses)} steps were read, the last ones are numbers{torn}")


def _stopped(history: History, known: Sequence[int]) -> str:
    """Says since when reports of steps have no loss any more: some programs print none that is no
    number. "" if they have.
    """
    reports = sorted({event.step or 0 for event in history.reports})
    since = [step for step in reports if known and step > known[-1]]
    apart = [after - before for before, after in itertools.pairwise(known)]
    if len(since) < MISSING or not apart or since[-1] - known[-1] < MISSING * median(apart):
        return ""
    return (
        f"there is no loss since step {known[-1]}, and {len(since)} later steps were reported: some"
        " programs leave out a loss that is not a number"
    )


def loss_equality(evidence: Evidence) -> Finding:
    """Each rank's reported losses equal those of the control arm, step by step, non-finite values
    included; others fail where a list asks for it by name. The state itself is not known.
    """
    history, control = evidence.history, evidence.control_history
    if control is None:
        return passed("nothing to check: this is the control arm, or there is none")
    mine, theirs = losses_of(history), losses_of(control)
    cure = LEAVE_OUT.format("loss-equality")
    pairs = [
        (step, rank, mine[step][rank], theirs[step][rank])
        for step in sorted(mine.keys() & theirs.keys())
        for rank in sorted(
            mine[step].keys() & theirs[step].keys(), key=lambda rank: -1 if rank is None else rank
        )
    ]

    broken = next((pair for pair in pairs if not _finite(pair[2]) and _finite(pair[3])), None)
    if broken is not None:
        witness, escapes = _told("loss", *broken), evidence.expects("sdc-escape")
        well = f"{witness}; {escapes[0]} is expected to escape" if escapes else ""
        return passed(well) if escapes else failed(witness)
    if lacking := _unread(history) or _unread(control, " of the control arm"):
        return unknown(f"{lacking}{cure}")
    if not pairs and not history.committed_step:
        return unknown(f"no step of this arm is known, so no loss can be compared{cure}")
    if not pairs:
        return unknown(
            "the command reports no losses of the same rank and step that could be compared: a"
            f" beacon or an expression tells them{cure}"
        )
    different = next((pair for pair in pairs if not _same(pair[2], pair[3])), None)
    if different is None:
        steps = len({step for step, *_ in pairs})
        return passed(f"the reported losses are the same in {steps} steps")
    step, rank, ours, others = different
    before = losses_before(history, step, rank)
    proven = before and _same(before, others) and not _same(before, ours)
    why = NOT_RESTORED if proven else "whether the script is deterministic is not known"
    said, asked = _told("reported loss", *different), evidence.cell.scenario.invariants
    if isinstance(asked, list | tuple) and "loss-equality" in asked:
        return failed(f"{said}, and the scenario asks that they are equal")
    return unknown(f"{said}: {why}{cure}")


def unread_shown(evidence: Evidence) -> str:
    """Message about values that could not be read; "" if all could."""
    return "; ".join(
        f"{count} values of {name} could not be read, such as {example!r}"
        for name, (count, example) in sorted(unread_of(evidence.history).items())
    )


def _unread(history: History, whose: str = "", *, since: int = 0) -> str:
    """Why losses of an arm cannot be judged: some of step ``since`` or later could not be read."""
    one = unread_of(history, since).get("loss")
    if one is None:
        return ""
    return (
        f"{one[0]} losses{whose} could not be read, such as {one[1]!r}: have the group loss"
        " of workload.progress.regex match one number, or print one"
    )


def _same(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether a rank reported the same for a step. Ranks that do not name themselves may be read
    more or less often.
    """
    ours, others = {repr(value) for value in mine}, {repr(value) for value in theirs}
    return ours <= others or others <= ours


def _finite(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values))


def _told(
    what: str, step: int, rank: int | None, mine: Sequence[float], theirs: Sequence[float]
) -> str:
    ours, others = (", ".join(map(repr, dict.fromkeys(values))) for values in (mine, theirs))
    whose = "" if rank is None else f"rank {rank}: "
    return f"{whose}{what} {ours} at step {step}, the control arm had {others}"
