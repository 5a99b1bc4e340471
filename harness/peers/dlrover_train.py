"""The common job as a DistributedDataParallel script with DLRover's Flash Checkpoint; started by
``dlrover_launch``.

``JOB_MEMORY_EVERY``: steps between saves to shared memory alone; without it only those to
storage, which pass through shared memory too.
"""

from __future__ import annotations

import copy
import os
from collections import UserDict
from collections.abc import ItemsView
from typing import Any

import torch.distributed as dist
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from torch.nn.parallel import DistributedDataParallel

from trainchaos.harness.peers.common import Training, join_group, point, train_step


class Midway(UserDict[str, Any]):
    """The later part of a state, with the point ``saving`` before it is copied to shared memory.
    ``passes``: how often it is walked through until then.
    """

    def __init__(self, part: dict[str, Any], step: int, passes: int) -> None:
        super().__init__(part)
        self._step, self._passes = step, passes

    def items(self) -> ItemsView[str, Any]:
        """What DLRover asks for in each pass."""
        self._passes -= 1
        if self._passes == 0:
            point("saving", self._step)
        return super().items()


class Checkpoints:
    """Saves when it is time to, and loads, as the Flash Checkpoint page shows."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._every, self._memory_every = (
            training.job.every,
            int(os.environ.get("JOB_MEMORY_EVERY") or 0),
        )
        training.checkpoints.mkdir(parents=True, exist_ok=True)
        self._checkpointer = DdpCheckpointer(str(training.checkpoints))

    def load(self) -> int:
        """The newest from memory, else from disk; its step, 0 without one."""
        found = self._checkpointer.load_checkpoint()
        # What comes from memory is shared by all ranks and must be copied, as every GPU does by
        # itself: an optimizer on CPU would go on using it in place, and so would those of all other
        # ranks.
        return self._training.restore(copy.deepcopy(found)) if found else 0

    def save(self, step: int) -> None:
        """Called by every rank after each step; rank 0's state is saved."""
        if step % self._every == 0:
            self._checkpointer.save_checkpoint(
                step, self._state(step), storage_type=StorageType.DISK
            )
        elif self._memory_every and step % self._memory_every == 0:
            self._checkpointer.save_checkpoint(
                step, self._state(step), storage_type=StorageType.MEMORY
            )

    def _state(self, step: int) -> dict[str, Any]:
        state = self._training.state(step)
        # without shared memory yet, DLRover walks through the state once more before, to know its
        # size
        passes = 2 if self._checkpointer._engine._shm_handler.shared_memory is None else 1
        return state | {"optimizer": Midway(state["optimizer"], step, passes)}


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    training = Training.from_environment()
    join_group()
    net = DistributedDataParallel(training.model)
    checkpoints = Checkpoints(training)
    for step in range(checkpoints.load() + 1, training.job.steps + 1):
        train_step(training, net, step)
        checkpoints.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
