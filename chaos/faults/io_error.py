"""Writes of checkpoints fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Fidelity, Landed, Occurrence, Where
from trainchaos.chaos.fault.targets import DiskTrouble, RankTarget

_WORDS = {
    "EIO": "Input/output error",
    "ESTALE": "Stale file handle",
    "ENOSPC": "No space left on device",
}


class IoError(Fault):
    """File operations of the rank's checkpoint saves fail, as with a broken disk or a lost file
    server. Emulated.

    Target a rank that saves: rank 0, or with a sharded checkpoint any rank that writes a part.
    ``error``: EIO, ESTALE or ENOSPC; ``probability``: that an operation fails; ``operations``:
    which ones. Landed: the job itself reported a save that failed with that error.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    fidelity: ClassVar[Fidelity] = Fidelity.EMULATED
    lasting: ClassVar[bool] = True
    harmless: ClassVar[bool] = True
    beside_steps: ClassVar[bool] = True
    on_saves: ClassVar[bool] = True

    error: Literal["EIO", "ESTALE", "ENOSPC"] = "EIO"
    probability: float = Field(default=1.0, gt=0, le=1)
    operations: tuple[Literal["mkdir", "write", "fsync", "rename", "delete"], ...] = (
        "write",
        "fsync",
    )

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Break the disk."""
        trouble = DiskTrouble(
            error=self.error, probability=self.probability, operations=self.operations
        )
        target.set_disk(trouble)
        return {"error": self.error, "probability": self.probability}

    def heal(self, target: RankTarget) -> None:
        """Repair the disk."""
        target.set_disk(None)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """A failed save of the target, or of its part of one, after the injection."""
        for event in events:
            mine = event.actor == occurrence.process and event.time_ns > occurrence.time_ns
            failed = mine and event.kind in (
                Kind.CHECKPOINT_FAILED,
                Kind.CHECKPOINT_KEPT,
                Kind.CHECKPOINT_PART,
            )
            if failed and _WORDS[self.error] in event.data["error"]:
                evidence = {"checkpoint": event.data["checkpoint"], "error": event.data["error"]}
                return Landed(witness="job: failed save", evidence=evidence)
        return None
