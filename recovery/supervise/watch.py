"""Detects failures that no message reports, by clocks and progress marks: who hangs at work, while
it starts, or while a group forms.
"""

from __future__ import annotations

from collections.abc import Iterator

from recovery.policy.strategy import Cause, Health
from recovery.supervise.failures import Symptom
from recovery.supervise.job_state import JobState

SOONEST_S = 0.005
"""Between two looks at least, however soon a rank is late: one that gets no processor may be late
for long.
"""


class Watch:
    """Looks at a job. Each method yields what it finds, so that what a symptom was answered by is
    seen before the next is looked for.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job

    @property
    def due_s(self) -> float:
        """In how long to look again at members at work, at the latest."""
        return min(self._job.timing.tick_s, max(SOONEST_S, self._job.progress.detector.due_s))

    def at_work(self) -> Iterator[Symptom]:
        """The member that hangs, or that all hang and none can be blamed."""
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
        """A member that is stopped and will not join, or no sign of life of any of them.

        All wait for each other here, so that marks tell nothing of a single one; but while one of
        them reads, restores or copies there is progress. Of a silent node it is not known.
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
                continue  # what the one before was answered by has ended it
            if process in late:
                detail = f"not ready after {timing.start_timeout_s:.0f} s"
                yield Symptom(process=process, cause=Cause.START_TIMEOUT, detail=detail)
            else:
                detail = "stopped while it starts"
                yield Symptom(process=process, cause=Cause.HANG, detail=detail)
