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
    """Facts about a command at its end. ``ranks``: number found, 0 for none; ``lines``, ``last``,
    ``recent``: of its output; ``unread``: those behind the last step; ``again``: its steps began
    again by themselves; ``refused``: malformed reports;
    ``injected``: kind of the newest fault; ``preempted``: a fault told it to end;
    ``starts``: how often the command was started;
    ``other_total``: a number of steps that it stated and that is not workload.steps.
    """

    spec: WorkloadSpec
    reports: int
    committed: int
    finished: bool
    ranks: int
    lines: int
    last: tuple[str, ...]
    recent: tuple[str, ...]
    again: bool
    refused: int
    unread: tuple[str, ...] = ()
    other_total: int | None = None
    injected: str = ""
    preempted: bool = False
    starts: int = 1

    @classmethod
    def of(
        cls,
        spec: WorkloadSpec,
        observer: Observer,
        listener: CommandListener,
        injected: str = "",
        starts: int = 1,
    ) -> Findings:
        """Collect them from the observer and the listener."""
        return cls(
            spec=spec,
            reports=observer.reports,
            committed=observer.committed,
            finished=observer.finished,
            ranks=len(observer.members) if observer.generation else 0,
            lines=listener.lines,
            last=listener.last,
            recent=listener.recent,
            again=observer.began_again,
            refused=listener.refused,
            unread=listener.unread,
            other_total=listener.other_total,
            injected=injected,
            preempted=observer.preempted,
            starts=starts,
        )


def outcome_of(found: Findings, ended: CommandEnded | None) -> tuple[str, str]:
    """(outcome, reason). ``ended``: None if the command made no progress before the deadline
    instead of ending.
    """
    limit_s, name = found.spec.patience(begun=bool(found.reports))
    deadline = f"{limit_s:g} s (workload.{name})"
    if ended is None:
        if not found.reports:
            return "timed-out", f"no progress within {deadline}: {_why_none(found, late=True)}"
        if found.finished:
            return (
                "timed-out",
                (
                    f"all {found.spec.steps} steps were reported, but the command had not ended"
                    f" {deadline} later"
                ),
            )
        return "timed-out", f"no step for {deadline} after step {found.committed}"
    if not found.reports and not ended.well:
        return (
            "gave-up",
            f"the command ended with {ended.how} before any progress was seen{_failed(found)}",
        )
    if not found.reports:
        return (
            "gave-up",
            f"the command ended with {ended.how} and no progress was seen: {_why_none(found)}",
        )
    if found.finished and ended.well:
        return "completed", ""
    where = f"at step {found.committed} of {found.spec.steps}"
    if ended.well:
        return "gave-up", f"the command ended with exit code 0 {where}: {_why_short(found)}"
    return "gave-up", f"the command ended with {ended.how} {where}{_failed(found)}"


def unread_steps(found: Findings, seen: Derived) -> str:
    """What to change where lines are steps and none of them was read. ``seen``: what they are."""
    cure = seen.shown
    if found.spec.progress == "beacon":
        return (
            f"no beacon was heard: call {BEACON} after each step, or, as {seen.steps} steps were"
            f" printed, give {cure}{_shown(found)}"
        )
    return (
        f"{key_of(found.spec.progress)} matched none of {found.lines} lines, of which {seen.steps}"
        f" look like steps: give {cure}{_shown(found)}"
    )


def _why_short(found: Findings) -> str:
    """Why a command that ended well has not done all steps."""
    if change := next(changed_form(found.unread, found.committed), ""):
        return f"{change}{_shown(found)}"
    if found.again:
        return (
            "its steps began again from the first without a fault, so they are those of an epoch:"
            f" let progress find the step of the whole run{_shown(found)}"
        )
    if not found.ranks:
        return f"its steps were read, and no rank was found{_shown(found)}"
    if found.preempted:
        return (
            f"{found.injected} had told it to end; workload.restarts: {found.starts} starts it"
            f" again, as a scheduler does{_shown(found)}"
        )
    if found.injected and found.starts > 1:
        return (
            f"it was started again after {found.injected}, and ended with exit code 0 without doing"
            f" its remaining steps: have it go on until its last step{_shown(found)}"
        )
    if found.injected:
        return (
            f"{found.injected} had hit it, and an end with exit code 0 is started again by nobody:"
            f" have it end with an error when it has not done all its steps{_shown(found)}"
        )
    return f"set workload.steps to what it does{_shown(found)}"


def _why_none(found: Findings, *, late: bool = False) -> str:
    """``late``: it had not ended at a deadline."""
    seen = derive(found.recent) if found.other_total is None and not found.refused else None
    if seen is not None and seen.certain(found.spec.steps):
        return unread_steps(found, seen)
    if seen is not None and not late and found.spec.progress != "beacon":
        return (
            f"{key_of(found.spec.progress)} matched none of {found.lines} lines, of which"
            f" {seen.steps} may be steps: if they are, give {seen.shown}{_shown(found)}"
        )
    if late and found.lines and found.other_total is None and not found.refused:
        limit = "workload.start_deadline"
        return (
            f"it printed {found.lines} lines, and none of them is surely a step: raise {limit} if"
            f" it takes longer to start{_or_else(found)}{_shown(found)}"
        )
    if found.spec.progress != "beacon":
        key = key_of(found.spec.progress)
        if not found.lines:
            return f"it printed nothing, so {key} found nothing"
        if found.other_total is not None:
            return (
                f"{key} matched, but the lines state {found.other_total} steps and workload.steps"
                f" is {found.spec.steps}: correct workload.steps{_shown(found)}"
            )
        if found.refused:
            return f"{key} matched, but group step was never a number{_shown(found)}"
        return f"{key} matched none of {found.lines} lines{_shown(found)}"
    if found.refused:
        return (
            f"{found.refused} lines of the beacon were not understood: copy chaos/beacon.py again"
        )
    cure = f"call {BEACON} after each step, or give progress: {{regex: ...}}"
    return f"no beacon was heard: {cure}{_shown(found)}"


def _or_else(found: Findings) -> str:
    if found.spec.progress == "beacon":
        return f", or call {BEACON} after each step"
    return f"; else correct {key_of(found.spec.progress)}, which matched none"


def keeps_ending(found: Findings, times: int) -> str:
    """That the ranks end again and again before a step is seen."""
    return f"its ranks were started {times} times, and ended before a step was seen{_failed(found)}"


def _failed(found: Findings) -> str:
    """The error that tells most, if the last lines do not show it, and the last lines."""
    return _shown(found, *errors.telling_error(found.recent))


def _shown(found: Findings, error: Sequence[str] = (), times: int = 1) -> str:
    if not found.last:
        return "; it printed nothing"
    return "; " + printed(found.last[-SHOWN_LINES:], error, times)


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
