"""DLRover: an elastic agent that restarts all workers, with checkpoints in shared memory that
survive them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import (
    CommonJob,
    Drive,
    Requirements,
    Stack,
    module,
)

MAX_RESTARTS = {"default": 3, "tuned": 100}
"""3: the default by its page of arguments (docs/deployment/argument.md); its parser has torch's, 0.
"""
GROUP_TIMEOUT_S = 10
MEMORY_SAVES = 10
"""Saves to memory per save to storage."""


class DLRover(Stack):
    """``dlrover-run`` beside its master, and Flash Checkpoint in the script."""

    title: ClassVar[str] = "DLRover 0.6.1, flash checkpoint"
    requirements: ClassVar[Requirements | None] = Requirements(
        pins=(
            "grpcio==1.85.1",
            "protobuf==7.36.2",
            "psutil==7.2.2",
            "deprecated==1.3.1",
            "requests==2.34.2",
            "packaging==26.3",
            "nvidia-ml-py==13.615.71",
            "kubernetes==37.0.2",
            "setuptools==84.2.1",
        ),
        without_dependencies=("dlrover==0.6.1",),
        python=">=3.11,<3.13",
        probe="dlrover.trainer.torch.flash_checkpoint.ddp",
    )
    tuned_because: ClassVar[str] = (
        "The Flash Checkpoint page (docs/blogs/flash_checkpoint.md) recommends saves to memory"
        f" more often than to storage, in its quick start {MEMORY_SAVES} times as often"
        " (--save_memory_interval 50 --save_storage_interval 500): a failed process then goes back"
        " to the newest save in memory. The limit of collectives is torch's own"
        " (torch.distributed.init_process_group, timeout; default 30 minutes): DLRover's hang"
        " detection (docs/deployment/argument.md, hang_detection and hang_downtime) looks at the"
        " load of GPUs, of which there are none here. A stopped rank is waited for 30 s: DLRover"
        " does not hand torch's --shutdown-timeout on to its agent. Restarts enough that they do"
        " not run out."
    )

    def chosen(self) -> Mapping[str, object]:
        chosen: dict[str, object] = {
            "--standalone": True,
            "--max-restarts": MAX_RESTARTS[self.settings],
        }
        if self.settings == "tuned":
            chosen["save_memory_interval"] = (
                f"checkpoint interval / {MEMORY_SAVES}, at least 1 step"
            )
            chosen["init_process_group(timeout)"] = f"{GROUP_TIMEOUT_S} s"
        return chosen

    def drive(self, job: CommonJob, python: Path) -> Drive:
        env = job.environment()
        if self.settings == "tuned":
            env["JOB_MEMORY_EVERY"] = str(max(1, job.every // MEMORY_SAVES))
            env["JOB_GROUP_TIMEOUT"] = str(GROUP_TIMEOUT_S)
        restarts = f"--max-restarts={MAX_RESTARTS[self.settings]}"
        command = module(python, "trainchaos.harness.peers.dlrover_launch", restarts)
        return Drive(argv=command, env=env)

    def fidelity(self) -> tuple[str, ...]:
        return (
            (
                "a local master on the same machine, started before the agent; on Kubernetes the"
                " operator starts it"
            ),
            (
                "the script copies the state that it restores from shared memory, as a GPU does by"
                " itself: without, the optimizers of all ranks went on in the same memory on CPU,"
                " and losses differed from the second step on"
            ),
            "no hang detection: DLRover's reads GPU counters",
            "the loss of a node, which DLRover answers with another pod, is not emulated",
        )
