"""Starts the processes of a job, until its first generation trains."""

from __future__ import annotations

from trainchaos.recovery.policy.strategy import Form, Health, StateFrom, Strategy
from trainchaos.recovery.supervise.job_state import JobState
from trainchaos.recovery.supervise.process_table import Process

EARLY_TRIES = 4
"""Processes started per wanted process at most, while machines are lost before training begins."""


class Startup:
    """Starts ranks and spares as the strategy wants them."""

    def __init__(self, job: JobState, strategy: Strategy) -> None:
        self._job = job
        self._strategy = strategy

    def begin(self, state: StateFrom) -> str | None:
        """Start the processes that are missing, and decide on the first generation. CHECKPOINT:
        from the newest checkpoint that verifies, if there is one.

        Returns the name of a process that failed under an earlier supervisor, without which the job
        cannot begin; then nothing is done.
        """
        table = self._job.table
        gone = [p.name for p in table if p.health is Health.DEAD and not p.noticed]
        if gone:
            return gone[0]
        roles = [p.role for p in table if p.health is not Health.DEAD]
        lacking = self._job.world - roles.count("worker")
        self._job.hands.expect("worker", self._strategy.start_mode, lacking)
        for _ in range(lacking):
            self._spawn_worker()
        for _ in range(self._strategy.spares_wanted - roles.count("spare")):
            table.spawn("spare", "warm")
        living = [p for p in table if p.health is not Health.DEAD]
        first = tuple(p.name for p in living if p.role == "worker")
        self._job.formation.want(Form(members=first, state=state, cause="start"), ())
        return None

    def can_replace(self, process: Process) -> bool:
        """Whether the process leaves because its machine does, and another may take its place."""
        wanted = self._job.world + self._strategy.spares_wanted
        early = self._job.table.started < EARLY_TRIES * wanted
        return self._strategy.replaces and process.noticed and early

    def replace(self, process: Process) -> None:
        """Start another process in its place. The job loses nothing with it."""
        if self._job.formation.awaits(process.name):
            self._job.failures.current.clear()  # no generation broke
            self._job.formation.exchange(process.name, self._spawn_worker())

    def _spawn_worker(self) -> str:
        return self._job.table.spawn("worker", self._strategy.start_mode)
