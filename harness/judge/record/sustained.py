"""When a command has recovered: with new steps that continue, not with the first line about a later
step.

Output may be late: a progress bar is redrawn during a stall, buffered lines come out when a process
ends, a survivor does a step or two before its launcher ends it. A new step is a recovery if new
steps follow it, at least ``STEPS`` of them and until at least ``LASTING_S`` later, before

- another failure (a stall is one) is seen,
- a generation starts that resumes before that step, so that it was not kept,
- the job ends unfinished.

Moreover, no stall may be seen while the fault still acts, neither the command nor a survivor may
fail later for want of the process that was lost (``command_end``), and the job must not crawl: of
the ``RATED`` new steps that follow (near the end, of the last ``RATED`` of all), at least one takes
no more than ``CRAWL`` times the usual step before the failure. A job that lost ranks is slower than
before, but not by that much, and on a busy machine too one step in so many is fast. Steps that
cannot follow any more are not required: the next fault is injected, the job is done, or it was cut
short. A step that was not a recovery counts as work before the failure, which is then redone.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.command_end import started_again_ns
from trainchaos.harness.judge.record.history import NS, History, StepRun

STEPS = 3
LASTING_S = 1.0
CRAWL = 5.0
RATED = 10


@dataclass(frozen=True, kw_only=True)
class SustainedRecovery:
    """``first``: the step that began the recovery, None: there was no recovery; ``high_water``: the
    highest step before it.
    """

    first: StepRun | None
    high_water: int


def lasting(
    history: History, number: int, mark: int, *, acting_until_ns: int, ended_ns: int | None
) -> SustainedRecovery:
    """The recovery from a failure of generation ``number``, before which ``mark`` was the highest
    step. ``acting_until_ns``: until when the fault acts; ``ended_ns``: when the command or a
    survivor failed for the same reason, if it did.
    """
    later = sorted(
        (run for run in history.runs if run.generation > number and run.committed_ns is not None),
        key=_order,
    )
    crawl = _Crawl(history, number, mark, later)
    for run in later:
        if run.step <= mark or crawl.at(run):
            continue
        trouble = _trouble(history, run, later, acting_until_ns)
        if trouble is None and ended_ns is not None and (run.committed_ns or 0) < ended_ns:
            trouble = ended_ns
        if trouble is None:
            return SustainedRecovery(first=run, high_water=mark)
        mark = max(mark, *(one.step for one in later if (one.committed_ns or 0) <= trouble))
    return SustainedRecovery(first=None, high_water=mark)


class _Crawl:
    """Whether new steps after a failure follow each other too slowly to be a recovery."""

    def __init__(self, history: History, number: int, mark: int, later: Sequence[StepRun]) -> None:
        before = [run.seconds for run in history.runs if run.generation <= number]
        self._limit_s = CRAWL * statistics.median(before) if before else float("inf")
        until = _next_fault_ns(history, min((r.committed_ns or 0 for r in later), default=0))
        self._new = [run for run in later if run.step > mark and (run.committed_ns or 0) <= until]

    def at(self, run: StepRun) -> bool:
        """Whether the job crawls at this step. Too few steps are not judged."""
        if len(self._new) <= RATED:
            return False
        following = self._new[bisect_right(self._new, _order(run), key=_order) :][:RATED]
        rated = following if len(following) == RATED else self._new[-RATED:]
        return min(one.seconds for one in rated) > self._limit_s


def _order(run: StepRun) -> tuple[int, int]:
    return run.committed_ns or 0, run.step


def _next_fault_ns(history: History, since: int) -> int:
    """Just before the next fault's injection, or the end of the arm."""
    faults = (e.time_ns - 1 for e in history.log.of(Kind.FAULT_INJECTED) if e.time_ns >= since)
    return min(faults, default=history.end_ns)


def _trouble(
    history: History, run: StepRun, later: Sequence[StepRun], acting_until_ns: int
) -> int | None:
    """When a new step was shown not to be a recovery, ns; None: it was one."""
    since, log = run.committed_ns or 0, history.log
    until = _asked_until(history, run, later)
    failures = [
        event.time_ns
        for event in log.of(Kind.FAILURE_DETECTED)
        if since < event.time_ns <= until
        or (event.data["cause"] == "hang" and since < event.time_ns < acting_until_ns)
    ]
    back = [
        g.started_ns
        for g in history.worked
        if since < g.started_ns <= until
        and g.number > run.generation
        and (g.resume_step or 0) < run.step
    ]
    ended = [history.end_ns] if history.unfinished and until >= history.end_ns else []
    return min((*failures, *back, *ended), default=None)


def _asked_until(history: History, run: StepRun, later: Sequence[StepRun]) -> int:
    """Until when new steps have to follow this one: until enough did for long enough, or until no
    more could.
    """
    since = run.committed_ns or 0
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
    return min(closed, _next_fault_ns(history, since), history.end_ns)


def at_the_end_again(history: History, failure: Event, high_water: int) -> int | None:
    """When a job that failed with no new step left was done again, ns: the highest step was
    repeated, or, if no step was, the restarted command ended well. None: neither happened.
    """
    started = started_again_ns(history, failure)
    if started is None or history.outcome != "completed":
        return None
    redone = [
        r.committed_ns or 0
        for r in history.runs
        if r.step >= high_water and (r.committed_ns or 0) > started
    ]
    ended = [
        event.time_ns
        for event in history.log.of(Kind.COMMAND_ENDED)
        if event.time_ns > started and event.data["exit_code"] == 0
    ]
    return min(redone, default=None) or min(ended, default=None)
