"""The disk that holds the checkpoints is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from chaos.events.log import Event
from chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from chaos.fault.targets import StorageTarget
from chaos.fault.witness import refused_write


class DiskFull(Fault):
    """No free byte on the file system of the checkpoints, a tmpfs of ``size_mib`` over their
    directory. Real.

    ``by``: ballast (somebody else's file takes all the room) or shrink (the file system is made as
    small as what it holds). The heal gives the room back. Landed: the kernel answers ENOSPC to a
    write from outside.
    """

    where: ClassVar[Where] = Where.STORAGE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MOUNT})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    by: Literal["ballast", "shrink"] = "ballast"
    size_mib: int = Field(default=64, ge=1, le=65536)

    def act(self, target: StorageTarget) -> Mapping[str, Any]:
        """Fill it."""
        target.fill(shrink=self.by == "shrink")
        return {"filled_by": self.by}

    def heal(self, target: StorageTarget) -> None:
        """Give the room back."""
        target.free()

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """What the kernel answered to a write from outside."""
        return refused_write(occurrence, events, "ENOSPC")
