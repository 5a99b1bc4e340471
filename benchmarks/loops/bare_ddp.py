"""One rank of the bare loop: DistributedDataParallel, no recovery, no logging. Prints its step
times as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.loops.bare import Loss, run
from trainchaos.harness.launch.workload import Trainable


def wrap(trainable: Trainable, world: int) -> Loss:
    """The loss goes through the wrapper, so that its hooks see the forward pass."""
    wrapped = DistributedDataParallel(trainable.model)

    def loss_of(ids: Sequence[int]) -> torch.Tensor:
        batch = trainable.load(ids)
        logits = wrapped(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return loss_of


if __name__ == "__main__":
    run(wrap)
