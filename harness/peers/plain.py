"""The common job as a plain DistributedDataParallel script, for torchrun: ``torchrun ... -m
trainchaos.harness.peers.plain``.

``JOB_GROUP_TIMEOUT``: seconds after which a collective gives up; without it torch's default, 30
minutes.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainchaos.chaos.errors import ChaosError
from trainchaos.harness.peers.common import Training, train


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    training = Training.from_environment()
    limit = os.environ.get("JOB_GROUP_TIMEOUT")
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(limit)) if limit else None)
    first = training.load()
    train(training, DistributedDataParallel(training.model), first)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ChaosError as error:
        raise SystemExit(str(error)) from error
