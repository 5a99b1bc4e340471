"""The training loop of a built-in workload under recovery."""

from __future__ import annotations

import os
import warnings

import torch

from chaos import plugins
from harness.rank import RankConfig
from harness.workload import BuildContext, Trainable, Workload
from recovery.job import Job, JobConfig


def build(config: RankConfig, job: JobConfig) -> Trainable:
    """Build the workload, deterministic, on the rank's device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)
    workload = plugins.load("harness.workloads", Workload)[config.workload](**config.workload_params)
    return workload.build(
        BuildContext(data=config.data, device=config.device, seed=job.seed, steps=job.steps)
    )


def warm_up(job: Job, trainable: Trainable) -> None:
    """One forward and backward pass that changes nothing, so that the first step costs what every step costs."""
    job.reducer.rehearse()
    trainable.loss(trainable.load([0, 0])).backward()  # there may be no second sample
    job.reducer.rehearse()


def train(job: Job, trainable: Trainable) -> None:
    """Train until the supervisor says stop."""
    job.loss_of = lambda samples: trainable.loss(trainable.load(samples))
    while job.running():
        with job.step() as step:
            for samples in step.batches():
                batch = trainable.load(samples)
                step.phase("forward")
                loss = trainable.loss(batch)
                step.backward(loss)
            step.commit()
