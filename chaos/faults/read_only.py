"""The disk that holds the checkpoints can no longer be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, NothingSaved
from chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from chaos.fault.targets import StorageTarget
from chaos.fault.witness import refused_write


class ReadOnly(Fault):
    """The file system of the checkpoints, a tmpfs of ``size_mib`` over their directory, is
    remounted read-only. Real.

    It is what a kernel does after errors of a disk. The heal makes it writable again. Landed: the
    kernel answers EROFS to a write from outside.
    """

    where: ClassVar[Where] = Where.STORAGE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MOUNT})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True

    size_mib: int = Field(default=64, ge=1, le=65536)

    def act(self, target: StorageTarget) -> Mapping[str, Any]:
        """Remount it."""
        target.set_read_only(True)
        return {"remounted": "ro"}

    def heal(self, target: StorageTarget) -> None:
        """Remount it."""
        target.set_read_only(False)

    def follows(self) -> tuple[Consequence, ...]:
        """No save."""
        return (NothingSaved(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """What the kernel answered to a write from outside."""
        return refused_write(occurrence, events, "EROFS")
