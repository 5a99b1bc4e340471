"""Ray Train: a controller replaces the whole worker group and passes it the last reported
checkpoint.
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

MAX_FAILURES = {"default": 3, "tuned": -1}
"""As in the examples of train/user-guides/fault-tolerance; -1: no limit."""
TUNED = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "10",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
}
GROUP_TIMEOUT_S = 10


class RayTrain(Stack):
    """``TorchTrainer`` with ``FailureConfig`` and reported checkpoints, in a separate
    Ray cluster.
    """

    title: ClassVar[str] = "Ray Train 2.60"
    requirements: ClassVar[Requirements | None] = Requirements(
        pins=("ray[train]==2.60.0",),
        python=">=3.11,<3.14",
        probe="ray.train.torch",
    )
    tuned_because: ClassVar[str] = (
        "Ray's page on failures and hangs (docs.ray.io, train/user-guides/debugging) lists the"
        " timeouts: how often the controller looks at its workers"
        " (RAY_TRAIN_HEALTH_CHECK_INTERVAL_S, 2 s as shipped, which also delays ray.train.report),"
        " after what time a worker that does not answer is lost"
        " (RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S, 600 s), and TorchConfig(timeout_s), 1800 s, for"
        " which Ray's maintainers recommend 10 s (ray #22349). Workers that are replaced are waited"
        " for while they leave their group (TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, 30 s; ray"
        " #56182): in vain where one hangs. Elastic training (train/user-guides/elastic-training)"
        " is for machines that are gone; here a new worker always finds room. Failures are retried"
        " without a limit (train/user-guides/fault-tolerance)."
    )

    def chosen(self) -> Mapping[str, object]:
        chosen: dict[str, object] = {
            "FailureConfig(max_failures)": MAX_FAILURES[self.settings],
            "TorchConfig(backend)": "gloo",
            "ScalingConfig(num_workers)": "ranks of the job",
        }
        if self.settings == "tuned":
            chosen |= TUNED | {"TorchConfig(timeout_s)": GROUP_TIMEOUT_S}
        return chosen

    def drive(self, job: CommonJob, python: Path) -> Drive:
        env = job.environment() | {"JOB_MAX_FAILURES": str(MAX_FAILURES[self.settings])}
        if self.settings == "tuned":
            env |= TUNED | {"JOB_GROUP_TIMEOUT": str(GROUP_TIMEOUT_S)}
        return Drive(argv=module(python, "trainchaos.harness.peers.ray_launch"), env=env)

    def fidelity(self) -> tuple[str, ...]:
        return (
            "one node, whose logical CPUs are as many as the job needs, whatever the machine has",
            "storage is a directory of this machine",
            (
                "max_failures is 0 as shipped, which recovers from nothing; here it is as in Ray's"
                " own examples"
            ),
            "the hang detector of 2.60 reads NCCL, which is not used here",
        )
