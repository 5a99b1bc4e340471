"""The coordinator that supervises the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chaos.fault.base import Fault
from chaos.schedule.plan import PlannedFault
from harness.arm.fault_context import Scene
from harness.inject.sites import Aim, Miss


@dataclass(frozen=True)
class CoordinatorHandle:
    """See chaos.fault.targets.CoordinatorTarget."""

    scene: Scene

    def kill(self, down_s: float) -> None:
        """Lose it; another takes over later."""
        self.scene.lose_coordinator(down_s)


class CoordinatorSite:
    """There is one. All ranks are witnesses: their own logs say whether they went on."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Sequence[Aim | Miss]:
        """The coordinator."""
        world = range(self._scene.setup.cell.scenario.workload.ranks)
        names = tuple(name for rank in world if (name := self._scene.process_of(rank)))
        return [
            Aim(
                target=CoordinatorHandle(self._scene),
                who={"coordinator": "the job's"},
                processes=names,
            )
        ]

    def reachable(self, planned: PlannedFault) -> bool:
        """As soon as there is one again."""
        return self._scene.has_coordinator
