"""The file system of the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.fault.targets import StorageTarget
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import Aims, MissingTarget, OccurrenceTarget, Site


class StorageHandle:
    """The file system for one occurrence; see chaos.fault.targets.StorageTarget."""

    def __init__(self, scene: Scene, storage: StorageTarget) -> None:
        self.path = storage.path
        self._wanted = scene.in_force
        self._storage = storage

    def fill(self, *, shrink: bool) -> None:
        """Fill the file system until no byte is free."""
        self._wanted.begin("full", "storage", id(self))
        self._storage.fill(shrink=shrink)

    def free(self) -> None:
        """Free the space, unless another fault still keeps it full."""
        if not self._wanted.end("full", "storage", id(self)):
            self._storage.free()

    def set_read_only(self, read_only: bool) -> None:
        """Remount it; it stays read-only while another fault wants that."""
        if read_only:
            self._wanted.begin("read-only", "storage", id(self))
            self._storage.set_read_only(True)
        elif not self._wanted.end("read-only", "storage", id(self)):
            self._storage.set_read_only(False)

    def probe(self) -> str | None:
        """The kernel's error for a small write, or None."""
        return self._storage.probe()


class StorageSite(Site):
    """The one file system of an arm's checkpoints."""

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """The file system; the kernel's answer to a write from outside is the witness."""
        storage, who = self._scene.surface.storage, {"storage": "checkpoints"}
        if storage is None:
            return [
                MissingTarget(who=who, reason="the checkpoints have no file system of their own")
            ]
        handle = StorageHandle(self._scene, storage)
        return [OccurrenceTarget(target=handle, who=who, look=lambda: _look(handle))]


def _look(storage: StorageTarget) -> Mapping[str, Any] | None:
    said = storage.probe()
    return {"errno": said} if said else None
