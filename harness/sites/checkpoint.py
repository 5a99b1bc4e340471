"""Committed checkpoints on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.fault import Fault
from chaos.schedule import PlannedFault
from harness.scene import Scene
from harness.sites import Aim, Miss
from recovery import checkpoints


@dataclass(frozen=True)
class CheckpointHandle:
    """One committed checkpoint; see chaos.targets.CheckpointTarget."""

    checkpoint: checkpoints.Checkpoint
    older_checkpoint: checkpoints.Checkpoint | None
    seed: int

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.checkpoint.path

    @property
    def older(self) -> Path | None:
        """Directory of the next older one, if any."""
        return self.older_checkpoint.path if self.older_checkpoint else None

    def verify(self) -> str | None:
        """The verifier's complaint, or None."""
        try:
            checkpoints.verify(self.checkpoint)
        except checkpoints.CorruptCheckpoint as error:
            return str(error)
        return None


class CheckpointSite:
    """The checkpoint a fault names, as they lie on disk now."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Sequence[Aim | Miss]:
        """One checkpoint."""
        found = checkpoints.newest_first(self._scene.setup.checkpoints)
        if planned.checkpoint != "latest":
            found = [c for c in found if c.step <= int(planned.checkpoint or 0)]
            found = found if found and found[0].step == planned.checkpoint else []
        if not found:
            return [Miss(who={"checkpoint": None}, reason="no such checkpoint")]
        newest = found[0]
        # Another place each time: the same bit flipped twice is as good as new.
        handle = CheckpointHandle(newest, found[1] if len(found) > 1 else None, planned.seed + number)
        who = {"checkpoint": newest.name}
        # The recovery stack's own verifier, which the fault does not know, is the witness.
        return [
            Aim(target=handle, who=who, checkpoint=newest.name, step=newest.step, look=lambda: _look(handle))
        ]

    def reachable(self, planned: PlannedFault) -> bool:
        """Files are always there."""
        return True


def _look(handle: CheckpointHandle) -> Mapping[str, Any]:
    return {"verifier": handle.verify()}
