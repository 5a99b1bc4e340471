"""Committed checkpoints on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.command_checkpoints import newest
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.sites import Aims, MissingTarget, OccurrenceTarget, Site
from trainchaos.harness.script.processes.environment import checkpoint_directory
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.transport.wire import Extra

SAVER = 0  # the rank that commits each save, and without a sharded checkpoint writes all of it


@dataclass(frozen=True)
class CheckpointHandle:
    """One committed checkpoint; see chaos.fault.targets.CheckpointTarget."""

    checkpoint: checkpoints.Checkpoint
    older_checkpoint: checkpoints.Checkpoint | None
    seed: int

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.checkpoint.path

    @property
    def older(self) -> Path | None:
        """Directory of the next older checkpoint, if any."""
        return self.older_checkpoint.path if self.older_checkpoint else None

    def verify(self) -> str | None:
        """The verifier's error, or None."""
        try:
            checkpoints.verify(self.checkpoint)
        except checkpoints.CorruptCheckpoint as error:
            return str(error)
        return None


@dataclass(frozen=True)
class NextSave:
    """The next save, in the process that will do it; see chaos.fault.targets.CheckpointTarget."""

    scene: Scene
    process: str
    about: Mapping[str, Any]

    def break_next_save(self, stage: str, *, lose_unsynced: bool) -> None:
        """Command the fault agent of the process that saves."""
        command = {**self.about, "stage": stage, "lose": lose_unsynced}
        self.scene.send(self.process, Extra(topic="disk", payload=command))


class CheckpointSite(Site):
    """Finds the checkpoint that a fault names, among those on disk now."""

    def aims(self, planned: PlannedFault, fault: Fault, number: int) -> Aims:
        """One checkpoint."""
        if fault.hits_next_save:
            return [self._next_save(planned, number)]
        if self._scene.setup.cell.scenario.workload.command is not None:
            return [self._of_a_command(planned, number)]
        found = checkpoints.newest_first(self._scene.setup.checkpoints)
        if planned.checkpoint != "latest":
            found = [c for c in found if c.step <= int(planned.checkpoint or 0)]
            found = found if found and found[0].step == planned.checkpoint else []
        if not found:
            return [MissingTarget(who={"checkpoint": None}, reason="no such checkpoint")]
        newest = found[0]
        # A different place each time: flipping the same bit twice restores it.
        handle = CheckpointHandle(
            newest, found[1] if len(found) > 1 else None, planned.seed + number
        )
        who = {"checkpoint": newest.name}
        # The witness is the recovery stack's own verifier, which knows nothing of the fault.
        return [
            OccurrenceTarget(
                target=handle,
                who=who,
                checkpoint=newest.name,
                step=newest.step,
                look=lambda: _look(handle),
            )
        ]

    def _of_a_command(self, planned: PlannedFault, number: int) -> OccurrenceTarget | MissingTarget:
        directory = checkpoint_directory(self._scene.setup)
        saved = newest(directory, planned.seed + number) if directory is not None else None
        if saved is None:
            return MissingTarget(
                who={"checkpoint": None}, reason=f"there is no checkpoint in {directory}"
            )
        who = {"checkpoint": saved.path.name}
        # Reread the files against digests taken before the act: only the script knows their format.
        return OccurrenceTarget(
            target=saved,
            who=who,
            checkpoint=saved.path.name,
            look=lambda: {"verifier": saved.verify()},
        )

    def _next_save(self, planned: PlannedFault, number: int) -> OccurrenceTarget | MissingTarget:
        rank = planned.ranks[0] if planned.ranks else SAVER
        process = self._scene.process_of(rank)
        who = {"process": process, "rank": rank}
        if process is None:
            return MissingTarget(who=who, reason=f"no process holds rank {rank}, which saves")
        about = {"fault": planned.id, "occurrence": number}
        return OccurrenceTarget(
            target=NextSave(self._scene, process, about), who=who, processes=(process,), rank=rank
        )


def _look(handle: CheckpointHandle) -> Mapping[str, Any]:
    return {"verifier": handle.verify()}
