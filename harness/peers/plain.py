"""The common job as a plain DistributedDataParallel script, for torchrun: ``torchrun ... -m
trainchaos.harness.peers.plain``.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainchaos.chaos.errors import ChaosError
from trainchaos.harness.peers.common import Training, join_group, train


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    training = Training.from_environment()
    join_group()
    first = training.load()
    train(training, DistributedDataParallel(training.model), first)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ChaosError as error:
        raise SystemExit(str(error)) from error
