"""When a command has recovered: with new steps that go on, not with the first line about a later step.

What a program prints may be late: a progress bar is drawn again in the midst of a stall, buffered lines come out when a
process ends, a survivor does a step or two before its launcher ends it. A new step is a recovery when new ones follow
it, at least ``STEPS`` and up to one at least ``LASTING_S`` later, before

- another failure is seen (a stall is one),
- a generation begins that goes back behind that step, so that it was not kept,
- the job ends unfinished;

and when no stall is seen while the fault still acts. What cannot follow any more (the next fault is injected, the job
is done, somebody cut it short) is not asked for. What was no recovery counts as work before the failure, which is then
done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chaos.events import Kind
from harness.judging.lineage import NS, History, StepRun

STEPS = 3
LASTING_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Lasting:
    """``first``: the step that began the recovery, None: there was none; ``high_water``: the highest before it."""

    first: StepRun | None
    high_water: int


def lasting(history: History, number: int, mark: int, acting_until_ns: int) -> Lasting:
    """The recovery from a failure of generation ``number``, before which ``mark`` was the highest step.

    ``acting_until_ns``: until when the fault acts.
    """
    later = sorted(
        (run for run in history.runs if run.generation > number and run.committed_ns is not None),
        key=lambda run: (run.committed_ns or 0, run.step),
    )
    for run in later:
        if run.step <= mark:
            continue
        trouble = _trouble(history, run, later, acting_until_ns)
        if trouble is None:
            return Lasting(first=run, high_water=mark)
        mark = max(mark, *(one.step for one in later if (one.committed_ns or 0) <= trouble))
    return Lasting(first=None, high_water=mark)


def _trouble(history: History, run: StepRun, later: Sequence[StepRun], acting_until_ns: int) -> int | None:
    """When it showed that a new step had been no recovery, ns; None: it was one."""
    since, log = run.committed_ns or 0, history.log
    until = _asked_until(history, run, later)
    failures = [
        event.time_ns for event in log.of(Kind.FAILURE_DETECTED)
        if since < event.time_ns <= until
        or (event.data["cause"] == "hang" and since < event.time_ns < acting_until_ns)
    ]  # fmt: skip
    back = [
        g.started_ns for g in history.worked
        if since < g.started_ns <= until and g.number > run.generation and (g.resume_step or 0) < run.step
    ]  # fmt: skip
    ended = [history.end_ns] if history.unfinished and until >= history.end_ns else []
    return min((*failures, *back, *ended), default=None)


def _asked_until(history: History, run: StepRun, later: Sequence[StepRun]) -> int:
    """Until when new steps have to follow one: as many, or as long, as is asked, or as there could be."""
    since = run.committed_ns or 0
    next_fault = (
        event.time_ns - 1 for event in history.log.of(Kind.FAULT_INJECTED) if event.time_ns >= since
    )
    followed, high = 0, run.step
    closed = history.end_ns
    for one in later:
        at = one.committed_ns or 0
        if at <= since or one.step <= high:
            continue
        followed, high = followed + 1, one.step
        if followed >= STEPS and at - since >= LASTING_S * NS:
            closed = at
            break
    return min(closed, *next_fault, history.end_ns)


def at_the_end_again(history: History, failure_ns: int, high_water: int) -> int | None:
    """When a job that failed with nothing new left to do was at its end again, ns: the highest step was done once more,
    or, where no step was, the command that had been started again ended well. None: neither was."""
    started = min(
        (e.time_ns for e in history.log.of(Kind.COMMAND_STARTED) if e.time_ns > failure_ns), default=None
    )
    if started is None or history.outcome != "completed":
        return None
    redone = [
        r.committed_ns or 0 for r in history.runs if r.step >= high_water and (r.committed_ns or 0) > started
    ]
    ended = [
        event.time_ns for event in history.log.of(Kind.COMMAND_ENDED)
        if event.time_ns > started and event.data["exit_code"] == 0
    ]  # fmt: skip
    return min(redone, default=None) or min(ended, default=None)
