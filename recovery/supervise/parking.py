"""Aborts a generation: makes its survivors leave it, and waits until they have parked with their
state and the cause is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.strategy import Cause, Health
from trainchaos.recovery.spares.standing import SETTLE_SILENCE_S
from trainchaos.recovery.supervise.failures import Symptom
from trainchaos.recovery.supervise.job_state import JobState


class Parking:
    """The wait for the survivors of each generation in turn."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._deadline_s = 0.0
        self._patience_s = 0.0
        self._unforced = False  # survivors park by themselves
        self._settle_by_s: float | None = None  # spares were asked what they hold

    def abort(self) -> None:
        """Order every survivor to leave: a cascade from neighbour to neighbour is not enough."""
        job, limit_s = self._job, self._job.timing.park_timeout_s
        self._unforced = False
        self._deadline_s = job.hands.now_s() + limit_s
        job.progress.aborted(limit_s)
        job.table.abort(job.generation)

    def let_park(self, patience_s: float) -> None:
        """Let the survivors park by themselves; abort them after ``patience_s`` seconds without a
        sign of life.
        """
        self._unforced, self._patience_s = True, patience_s
        self._deadline_s = self._job.hands.now_s() + patience_s

    def overdue(self, now_s: float) -> Iterator[Symptom]:
        """Survivors that hang: those that stay in a generation that was aborted."""
        job = self._job
        if self._unforced:
            if job.progress.moved(job.members):  # they look for a sample that no rank can compute
                self._deadline_s = max(self._deadline_s, now_s + self._patience_s)
            elif now_s > self._deadline_s:
                self.abort()
            return
        staying = [process.name for process in job.table.training()]
        for name, measured in job.progress.staying(staying).items():
            yield Symptom(
                process=job.table[name],
                cause=Cause.HANG,
                detail="did not leave an aborted generation",
                measured=measured,
            )

    def lacks_cause(self, now_s: float) -> bool:
        """Whether all survivors have left in time and none died: then the connection failed; or
        spares have not said in time what they hold.
        """
        table, current = self._job.table, self._job.failures.current
        if self._settle_by_s is not None:
            return now_s > self._settle_by_s
        return (
            not self._unforced and now_s > self._deadline_s and not current and not table.training()
        )

    def conclude(self) -> bool:
        """Whether all survivors have left and a failure has to be answered; if so, the state each
        holds is recorded. A suspicion becomes a failure of an unknown process when its grace is
        over. Where no rank holds a whole state, spares that follow the job say what they hold.
        """
        job, failures = self._job, self._job.failures
        if job.table.some_train:
            return False
        if not failures.current:
            if failures.suspected_s is None:
                return False
            patience_s = failures.suspected_s + job.timing.blame_grace_s
            if job.hands.now_s() < patience_s:
                self._deadline_s = patience_s  # the cause may be a death not reported yet
                return False
            step = job.progress.committed + 1
            job.blame([], Cause.ERROR, failures.suspicion, step)
        if self._spares_settle():
            return False
        parked = [p for p in job.table.member_processes() if p.health is Health.PARKED]
        held = {p.name: {"step": p.step, "valid": p.valid, "pending": p.pending} for p in parked}
        spares = {p.name: p.step for p in job.table.where(Health.READY) if p.live and p.valid}
        said: dict[str, Any] = {"spares": spares} if spares else {}
        job.hands.record(Kind.SURVIVORS_PARKED, processes=held, **said)
        return True

    def _spares_settle(self) -> bool:
        job, now_s = self._job, self._job.hands.now_s()
        if self._settle_by_s is None:
            job.ask_spares()
            self._settle_by_s = now_s + job.timing.park_timeout_s + SETTLE_SILENCE_S
        if job.spares_settle and now_s <= self._settle_by_s:
            return True
        self._settle_by_s = None
        return False
