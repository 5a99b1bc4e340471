"""Detects failures that no message reports, by clocks and progress marks: a hang at work, during
startup, or while a group forms.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.recovery.policy.strategy import Cause, Health
from trainchaos.recovery.supervise.failures import Symptom
from trainchaos.recovery.supervise.job_state import JobState

SOONEST_S = 0.005
"""Shortest interval between two checks, however soon a rank is late: one that is starved of CPU may
stay late for long.
"""


class Watch:
    """Checks a job for hangs. Each method yields its findings one by one, so that the answer to a
    symptom takes effect before the next check.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job

    @property
    def due_s(self) -> float:
        """Seconds until the members at work have to be checked again, at the latest."""
        return min(self._job.timing.tick_s, max(SOONEST_S, self._job.progress.detector.due_s))

    def at_work(self) -> Iterator[Symptom]:
        """The member that hangs, or no process when all hang and none can be blamed."""
        job = self._job
        training = job.table.training()
        at_work = [member.name for member in training if not member.finished]
        hang = job.progress.look(job.generation, at_work, others_done=len(at_work) < len(training))
        if hang is not None:
            yield Symptom(
                process=job.table[hang.process] if hang.process else None,
                cause=Cause.HANG,
                detail=hang.detail,
                measured=hang.measured,
            )

    def forming(self, now_s: float) -> Iterator[Symptom]:
        """A member that is stopped and will not join, or a group without any sign of life.

        The members all wait for each other here, so that the marks of a single one tell nothing;
        but while one of them reads, restores or copies, there is progress. Whether a process on a
        silent node is stopped is unknown.
        """
        job, limit_s = self._job, self._job.timing.join_timeout_s
        stopped = job.table.stopped(now_s, job.timing.hang.stopped_s)
        moving = job.progress.moved(job.members) or bool(job.table.unheard())
        late = job.formation.is_late(now_s, moving=moving)
        if stopped:
            detail = "stopped while the group forms"
            yield Symptom(process=stopped[0], cause=Cause.HANG, detail=detail)
        elif late:
            detail = f"the group did not form: no progress for {limit_s:g} s"
            yield Symptom(process=None, cause=Cause.ERROR, detail=detail)

    def starting(self, now_s: float, *, stopped_too: bool) -> Iterator[Symptom]:
        """Processes that are not ready in time. ``stopped_too``: also those that are stopped."""
        table, timing = self._job.table, self._job.timing
        late = table.overdue(now_s)
        stopped = table.stopped_starting(now_s, timing.hang.stopped_s)
        for process in (*late, *(stopped if stopped_too else ())):
            if process.health is not Health.STARTING:
                continue  # the answer to the previous symptom has ended this process
            if process in late:
                detail = f"not ready after {timing.start_timeout_s:.0f} s"
                yield Symptom(process=process, cause=Cause.START_TIMEOUT, detail=detail)
            else:
                detail = "stopped while it starts"
                yield Symptom(process=process, cause=Cause.HANG, detail=detail)
