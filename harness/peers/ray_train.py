"""The common job as a Ray Train script, by its fault tolerance and checkpoint guides; started by
``ray_launch``.

``JOB_RAY_HOME``: directory of the Ray session. ``JOB_MAX_FAILURES``:
``FailureConfig(max_failures)``; without it Ray's default, 0. ``JOB_GROUP_TIMEOUT``:
``TorchConfig(timeout_s)``; without it Ray's default, 30 minutes. Ray's own RAY_TRAIN_... variables
are read by Ray.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch.distributed as dist

from trainchaos.harness.compare.environments.stack import CHECKPOINTS, CommonJob
from trainchaos.harness.peers.common import Training, train

OBJECT_STORE_BYTES = 128 * 1024 * 1024


def train_one(_: dict[str, object]) -> None:
    """What each worker runs."""
    training = Training.from_environment()
    net = ray.train.torch.prepare_model(training.model)
    first = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            training.checkpoints = Path(directory)
            first = training.load()

    def save(step: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            written = None
            if dist.get_rank() == 0:
                training.checkpoints = Path(directory)
                training.save(step)
                written = ray.train.Checkpoint.from_directory(directory)
            ray.train.report({"step": step}, checkpoint=written)

    train(training, net, first, save=save)


def main() -> None:
    """Start a cluster on this machine, and train in it."""
    job = CommonJob.from_environment(os.environ)
    ray.init(
        num_cpus=job.ranks,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=os.environ["JOB_RAY_HOME"],
    )
    limit = os.environ.get("JOB_GROUP_TIMEOUT")
    torch_config = (
        ray.train.torch.TorchConfig(backend="gloo", timeout_s=int(limit))
        if limit
        else ray.train.torch.TorchConfig(backend="gloo")
    )
    ray.train.torch.TorchTrainer(
        train_one,
        train_loop_config={},
        torch_config=torch_config,
        scaling_config=ray.train.ScalingConfig(num_workers=job.ranks),
        run_config=ray.train.RunConfig(
            name=CHECKPOINTS,
            storage_path=os.environ["CHAOS_SCRATCH"],
            failure_config=ray.train.FailureConfig(
                max_failures=int(os.environ.get("JOB_MAX_FAILURES") or 0)
            ),
        ),
    ).fit()


if __name__ == "__main__":
    main()
