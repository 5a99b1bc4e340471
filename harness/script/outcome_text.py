"""Outcome and reason of an arm of a command, for people: what was seen, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainchaos.chaos.scenario.progress import key_of
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.script.listen import errors
from trainchaos.harness.script.listen.derive import Derived, derive
from trainchaos.harness.script.listen.listening import CommandListener
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.listen.trial import changed_form
from trainchaos.harness.script.processes.command import CommandEnded

BEACON = "beacon.step(...) (from trainchaos import beacon)"
"""What a script calls, for people."""
SHOWN_LINES = 6
SHOWN_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is known of a command at its end. ``injected``: kind of the newest fault; ``starts``:
    how often the command was started.
    """

    spec: WorkloadSpec
    observer: Observer
    listener: CommandListener
    injected: str = ""
    starts: int = 1


def outcome_of(found: Findings, ended: CommandEnded | None) -> tuple[str, str]:
    """(outcome, reason). ``ended``: None if the command made no progress before the deadline
    instead of ending.
    """
    seen, steps = found.observer, found.spec.steps
    limit_s, name = found.spec.patience(begun=bool(seen.reports))
    deadline = f"{limit_s:g} s (workload.{name})"
    if ended is None:
        reason = f"no step for {deadline} after step {seen.committed}"
        if not seen.reports:
            reason = f"no progress within {deadline}: {_why_none(found, late=True)}"
        elif seen.finished:
            reason = (
                f"all {steps} steps were reported, but the command had not ended {deadline} later"
            )
        return "timed-out", reason
    if seen.reports and seen.finished and ended.well:
        return "completed", ""
    reason = f"the command ended with {ended.how}"
    if not seen.reports and ended.well:
        return "gave-up", f"{reason} and no progress was seen: {_why_none(found)}"
    if not seen.reports:
        return "gave-up", f"{reason} before any progress was seen{_failed(found)}"
    reason += f" at step {seen.committed} of {steps}"
    return "gave-up", reason + (f": {_why_short(found)}" if ended.well else _failed(found))


def unread_steps(found: Findings, seen: Derived) -> str:
    """What to change where lines are steps and none of them was read. ``seen``: what they are."""
    if found.spec.progress == "beacon":
        cure = f"call {BEACON} after each step, or, as {seen.steps} steps were printed, give"
        return f"no beacon was heard: {cure} {seen.shown}{_shown(found)}"
    return (
        f"{_none(found)}, of which {seen.steps} look like steps: give {seen.shown}{_shown(found)}"
    )


def _why_short(found: Findings) -> str:
    """Why a command that ended well has not done all steps."""
    fault, seen = found.injected, found.observer
    why = next(changed_form(found.listener.reader.unread, seen.committed), "")
    if why:
        pass
    elif seen.began_again:
        why = "its steps began again from the first without a fault, so they are those of an epoch:"
        why += " let progress find the step of the whole run"
    elif not (seen.generation and seen.members):
        why = "its steps were read, and no rank was found"
    elif seen.preempted:
        why = f"{fault} had told it to end; workload.restarts: {found.starts} starts it again, as a"
        why += " scheduler does"
    elif fault and found.starts > 1:
        why = f"it was started again after {fault}, and ended with exit code 0 without doing its"
        why += " remaining steps: have it go on until its last step"
    elif fault:
        why = f"{fault} had hit it, and an end with exit code 0 is started again by nobody: have it"
        why += " end with an error when it has not done all its steps"
    else:
        why = "set workload.steps to what it does"
    return why + _shown(found)


def _why_none(found: Findings, *, late: bool = False) -> str:
    """Why no step was seen. ``late``: it had not ended at a deadline."""
    reader, text, steps = found.listener.reader, found.listener.text, found.spec.steps
    beacon = found.spec.progress == "beacon"
    unmatched = reader.other_total is None and not reader.refused
    seen = derive(text.recent) if unmatched else None
    if seen is not None and seen.certain(steps):
        return unread_steps(found, seen)
    if seen is not None and not late and not beacon:
        why = f"{_none(found)}, of which {seen.steps} may be steps: if they are, give {seen.shown}"
    elif late and text.count and unmatched:
        why = f"it printed {text.count} lines, and none of them is surely a step: raise"
        why += " workload.start_deadline if it takes longer to start"
        why += f", or call {BEACON} after each step" if beacon else f"; else correct {_key(found)},"
        why += "" if beacon else " which matched none"
    elif beacon and reader.refused:
        return (
            f"{reader.refused} lines of the beacon were not understood: copy chaos/beacon.py again"
        )
    elif beacon:
        why = (
            f"no beacon was heard: call {BEACON} after each step, or give progress: {{regex: ...}}"
        )
    elif not text.count:
        return f"it printed nothing, so {_key(found)} found nothing"
    elif reader.other_total is not None:
        why = f"{_key(found)} matched, but the lines state {reader.other_total} steps and"
        why += f" workload.steps is {steps}: correct workload.steps"
    elif reader.refused:
        why = f"{_key(found)} matched, but group step was never a number"
    else:
        why = _none(found)
    return why + _shown(found)


def _key(found: Findings) -> str:
    progress = found.spec.progress
    return "workload.progress" if progress == "beacon" else key_of(progress)


def _none(found: Findings) -> str:
    return f"{_key(found)} matched none of {found.listener.text.count} lines"


def keeps_ending(found: Findings, times: int) -> str:
    """That the ranks end again and again before a step is seen."""
    return f"its ranks were started {times} times, and ended before a step was seen{_failed(found)}"


def _failed(found: Findings) -> str:
    """The error that tells most, if the last lines do not show it, and the last lines."""
    return _shown(found, *errors.telling_error(list(found.listener.text.recent)))


def _shown(found: Findings, error: Sequence[str] = (), times: int = 1) -> str:
    last = list(found.listener.output.last)
    return "; " + (printed(last[-SHOWN_LINES:], error, times) if last else "it printed nothing")


def printed(last: Sequence[str], error: Sequence[str] = (), times: int = 1) -> str:
    """Lines of a command for people: the newest, and before them an error that was raised so many
    ``times``, if they do not show it.
    """
    text = f"its last lines:\n{_rows(last)}"
    if error and error[-1] not in last:
        which = f"its error, {times} times" if times > 1 else "its first error"
        return f"{which}:\n{_rows(error)}\n    {text}"
    return text


def _rows(lines: Sequence[str]) -> str:
    return "\n".join(f"    | {line[:SHOWN_WIDTH]}" for line in lines)
