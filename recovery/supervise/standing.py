"""What anybody may ask about a supervised job."""

from __future__ import annotations

from recovery.policy.strategy import Health
from recovery.supervise.formation import Formation
from recovery.supervise.process_table import Crew
from recovery.supervise.progress import ProgressWatch
from recovery.supervise.supervision import Stage


class Standing:
    """Where the job is, and who is in it; ``recovery.supervise.controller`` moves it on."""

    stage: Stage
    _crew: Crew
    _formation: Formation
    _progress: ProgressWatch

    @property
    def done(self) -> bool:
        """The job is over and every process gone."""
        return self.stage is Stage.DONE

    @property
    def members(self) -> tuple[str, ...]:
        """Processes of the current generation by rank."""
        return self._crew.members

    @property
    def generation(self) -> int:
        """Number of the current generation, 0 before the first."""
        return self._formation.generation

    @property
    def committed(self) -> int:
        """Highest step committed by all members and not rolled back, as seen by now."""
        return self._progress.committed

    @property
    def ready_spares(self) -> tuple[str, ...]:
        """Processes waiting outside the generation, oldest first."""
        return tuple(p.name for p in self._crew.where(Health.READY))

    def process_of(self, rank: int) -> str | None:
        """The process that holds a rank now, if it lives."""
        name = self.members[rank] if rank < len(self.members) else ""
        return name if name and self._crew[name].health is not Health.DEAD else None

    def exit_was_expected(self, process: str) -> bool:
        """Whether the controller asked for this process's end."""
        entry = self._crew.get(process)
        return entry is not None and entry.expected_exit
