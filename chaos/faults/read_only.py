"""Makes the checkpoint file system read-only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, NothingSaved, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Need, Where
from trainchaos.chaos.fault.targets import StorageTarget
from trainchaos.chaos.fault.witness import refused_write


class ReadOnly(Fault):
    """The checkpoint file system, a tmpfs of ``size_mib`` mounted over the checkpoint directory, is
    remounted read-only. Real.

    A kernel does this after disk errors. Healing makes the file system writable again. Landed: the
    kernel answers EROFS to the harness's own probe write.
    """

    where: ClassVar[Where] = Where.STORAGE
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.MOUNT})
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True
    beside_steps: ClassVar[bool] = True

    size_mib: int = Field(default=64, ge=1, le=65536)

    def act(self, target: StorageTarget) -> Mapping[str, Any]:
        """Remount the file system read-only."""
        target.set_read_only(True)
        return {"remounted": "ro"}

    def heal(self, target: StorageTarget) -> None:
        """Remount the file system writable."""
        target.set_read_only(False)

    def follows(self) -> tuple[Consequence, ...]:
        """No save succeeds on the disk."""
        return (NothingSaved(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The kernel's answer to the harness's probe write."""
        return refused_write(occurrence, events, "EROFS")
