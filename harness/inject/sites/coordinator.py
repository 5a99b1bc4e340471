"""The coordinator that supervises the job."""

from __future__ import annotations

from dataclasses import dataclass

from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import Aims, OccurrenceTarget, Site


@dataclass(frozen=True)
class CoordinatorHandle:
    """The coordinator; see chaos.fault.targets.CoordinatorTarget."""

    scene: Scene

    def kill(self, down_s: float) -> None:
        """Stop the coordinator; another takes over after ``down_s``."""
        self.scene.lose_coordinator(down_s)


class CoordinatorSite(Site):
    """The one coordinator of a job. All ranks are witnesses: their logs show whether they
    continued.
    """

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """The coordinator."""
        world = range(self._scene.setup.cell.scenario.workload.ranks)
        names = tuple(name for rank in world if (name := self._scene.process_of(rank)))
        return [
            OccurrenceTarget(
                target=CoordinatorHandle(self._scene),
                who={"coordinator": "the job's"},
                processes=names,
            )
        ]

    def reachable(self, planned: PlannedFault) -> bool:
        """Whether a coordinator is running."""
        return self._scene.has_coordinator
