"""The training loop of a built-in workload under recovery."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import nullcontext
from functools import partial

import torch

from trainchaos.chaos import plugins
from trainchaos.chaos.scenario.workload import EvaluateSpec
from trainchaos.harness.launch.rank_config import RankConfig
from trainchaos.harness.launch.workload import BuildContext, Trainable, Workload
from trainchaos.recovery.rank.job import Job, JobConfig

SLACK_S = 60.0


def build(config: RankConfig, job: JobConfig) -> Trainable:
    """Build the workload, deterministic, on the rank's device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    if config.device.startswith("cuda"):
        torch.cuda.set_device(config.device)
    workload = plugins.one(plugins.WORKLOADS, Workload, config.workload)(**config.workload_params)
    schedule, microbatches = config.pipeline or ("1f1b", 1)
    return workload.build(
        BuildContext(
            data=config.data,
            device=config.device,
            seed=job.seed,
            steps=job.steps,
            schedule=schedule,
            microbatches=microbatches,
        )
    )


def warm_up(job: Job, trainable: Trainable) -> None:
    """One forward and backward pass that changes nothing, so that the first step is not slower than
    others.
    """
    job.reducer.rehearse()
    trainable.loss(trainable.load([0, 0])).backward()  # there may be no second sample
    job.reducer.rehearse()


def train(job: Job, trainable: Trainable, evaluate: EvaluateSpec | None = None) -> None:
    """Train until the supervisor says stop."""
    pipelined = job.arranged.pipeline > 1
    if not pipelined:
        job.loss_of = lambda samples: trainable.loss(trainable.load(samples))
    while job.running():
        with job.step() as step:
            for samples in step.batches():
                batch = trainable.load(samples)
                if pipelined:
                    step.run(partial(trainable.passes, batch, step.as_loss))
                    continue
                step.phase("forward")
                loss = trainable.loss(batch)
                step.backward(loss)
            step.commit()
        if (
            evaluate is not None
            and job.rank == 0
            and step.number == job.done
            and job.done % evaluate.every == 0
        ):
            _evaluate(job, trainable, evaluate)


def _evaluate(job: Job, trainable: Trainable, spec: EvaluateSpec) -> None:
    """Compute losses for the configured time, without training on them."""
    until_s = time.monotonic() + spec.takes
    with (
        job.busy("evaluation", limit_s=2 * spec.takes + SLACK_S) if spec.declared else nullcontext()
    ):
        trainable.model.eval()
        with torch.no_grad():
            while time.monotonic() < until_s:
                trainable.loss(trainable.load([0, 0]))
        trainable.model.train()
