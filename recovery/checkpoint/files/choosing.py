"""Which checkpoints of a directory a job may go back to. No torch here."""

from __future__ import annotations

from pathlib import Path

from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint, Origin
from trainchaos.recovery.checkpoint.files.fence import CheckpointFence
from trainchaos.recovery.checkpoint.files.retention import aside_in
from trainchaos.recovery.policy.doubts import Doubt, in_doubt


class CheckpointChooser:
    """``job``: its name, "" if it has none; ``fresh``: it was to begin with initial values, so that
    earlier checkpoints never count; ``fence``: of its directory, None: it has none.

    ``doubts``: what may hold a corrupted state, whether it is set aside or not.
    """

    def __init__(self, *, job: str, fresh: bool, fence: CheckpointFence | None) -> None:
        self.doubts: tuple[Doubt, ...] = ()
        self._job = job
        self._fresh = fresh
        self._fence = fence

    def wanted(self, newer_than: tuple[int, int] | None, checkpoint: Checkpoint) -> bool:
        """Whether it may be restored: it is not in doubt, not of an earlier job where this one
        began anew, and newer than generation and step of one in memory.
        """
        origin = checkpoints.origin_of(checkpoint)
        if origin is None:  # verification will refuse and report it
            return not self._fresh and (newer_than is None or checkpoint.step > newer_than[1])
        mine = self._is_mine(origin)
        if (self._fresh and not mine) or self.in_doubt(checkpoint):
            return False
        if newer_than is None:
            return True
        if not self._job and self._epoch is None:
            return checkpoint.step > newer_than[1]  # its generation is unknown
        return mine and (origin.generation, checkpoint.step) > newer_than

    def in_doubt(self, checkpoint: Checkpoint) -> bool:
        """Whether it may hold a corrupted state. A checkpoint of an earlier job is older than any
        generation of this one.
        """
        origin = checkpoints.origin_of(checkpoint) or Origin()
        generation = origin.generation if self._is_mine(origin) else 0
        return in_doubt(self.doubts, generation=generation, step=checkpoint.step)

    def aside(self, directory: Path | None) -> list[str]:
        """Names of checkpoints that were set aside and could otherwise have been restored."""
        found = aside_in(directory) if directory is not None else []
        if not self._fresh or directory is None:
            return found
        origins = {
            name: checkpoints.origin_of(Checkpoint(path=directory / name, step=0)) for name in found
        }
        return [
            name for name, origin in origins.items() if origin is not None and self._is_mine(origin)
        ]

    @property
    def why(self) -> str:
        """Why there is a doubt."""
        return (
            f"saved after step {min(step for _, step in self.doubts)}, at which the replicas last"
            " agreed"
        )

    @property
    def _epoch(self) -> int | None:
        return self._fence.epoch if self._fence is not None else None

    def _is_mine(self, origin: Origin) -> bool:
        """Whether this job saved it. The checkpoint's manifest says so even if the disk fails now;
        a job without a name goes by its epoch, and so do checkpoints from before names were
        recorded.
        """
        if self._job and origin.job:
            return origin.job == self._job
        return self._epoch == origin.epoch
