"""The disk that holds the checkpoints is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from trainchaos.chaos.fault.targets import StorageTarget
from trainchaos.chaos.fault.witness import refused_write


class DiskFull(Fault):
    """The checkpoint file system has no free byte left; it is a tmpfs of ``size_mib`` mounted over
    the checkpoint directory. Real.

    ``by``: ballast (another file takes all free space) or shrink (the file system is shrunk to its
    current content). Healing frees the space. Landed: the kernel answers ENOSPC to the harness's
    own probe write.
    """

    where: ClassVar[Where] = Where.STORAGE
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MOUNT})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True
    beside_steps: ClassVar[bool] = True

    by: Literal["ballast", "shrink"] = "ballast"
    size_mib: int = Field(default=64, ge=1, le=65536)

    def act(self, target: StorageTarget) -> Mapping[str, Any]:
        """Fill the file system."""
        target.fill(shrink=self.by == "shrink")
        return {"filled_by": self.by}

    def heal(self, target: StorageTarget) -> None:
        """Free the space."""
        target.free()

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The kernel's answer to the harness's probe write."""
        return refused_write(occurrence, events, "ENOSPC")
