"""The file system of the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chaos.fault.base import Fault
from chaos.fault.targets import StorageTarget
from chaos.schedule.plan import PlannedFault
from harness.arm.fault_context import Scene
from harness.inject.sites import Aim, Miss


class StorageSite:
    """There is one."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Sequence[Aim | Miss]:
        """The file system; the kernel's answer to a write from outside is the witness."""
        storage, who = self._scene.storage, {"storage": "checkpoints"}
        if storage is None:
            return [Miss(who=who, reason="the checkpoints have no file system of their own")]
        return [Aim(target=storage, who=who, look=lambda: _look(storage))]

    def reachable(self, planned: PlannedFault) -> bool:
        """It is always there."""
        return True


def _look(storage: StorageTarget) -> Mapping[str, Any] | None:
    said = storage.probe()
    return {"errno": said} if said else None
