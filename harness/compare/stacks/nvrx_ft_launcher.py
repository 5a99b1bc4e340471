"""NVIDIA Resiliency Extension, in-job restart: torchrun with a monitor beside each rank that ends
it when it hangs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.environments.stack import (
    CommonJob,
    Drive,
    Requirements,
    Stack,
    module,
)
from trainchaos.harness.compare.stacks._nvrx import needs

MAX_RESTARTS = 3
GROUP_TIMEOUT_S = 30.0
TUNED: Mapping[str, str] = {
    "--monitor-interval": "0.1",
    "--ft-param-workload_check_interval": "0.5",
    "--ft-param-initial_rank_heartbeat_timeout": "30",
    "--ft-param-rank_heartbeat_timeout": "3",
}


class NvrxFtLauncher(Stack):
    """``ft_launcher`` with heartbeats."""

    title: ClassVar[str] = "NVIDIA Resiliency Extension 0.4.1, ft_launcher"
    requirements: ClassVar[Requirements | None] = needs(
        "nvidia_resiliency_ext.fault_tolerance.launcher"
    )
    tuned_because: ClassVar[str] = (
        "Its page Heartbeats API Integration"
        " (docs/source/fault_tolerance/integration/heartbeats.rst) says that the timeouts 'need to"
        " be adjusted for each workload': rank_heartbeat_timeout at least the longest time between"
        " steps with a checkpoint, initial_rank_heartbeat_timeout long enough to start (defaults:"
        " 45 and 60 minutes). workload_check_interval is how often a monitor looks."
        " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is torch's own switch for restarts that would read"
        " the addresses of the group before (pytorch issue 135712)."
    )

    def chosen(self) -> Mapping[str, object]:
        chosen: dict[str, object] = {"--rdzv-backend": "c10d", "--max-restarts": MAX_RESTARTS}
        if self.settings == "tuned":
            chosen |= TUNED
            chosen["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            chosen["init_process_group(timeout)"] = f"{GROUP_TIMEOUT_S:g} s"
        return chosen

    def drive(self, job: CommonJob, python: Path) -> Drive:
        argv = module(
            python,
            "nvidia_resiliency_ext.fault_tolerance.launcher",
            nnodes=1,
            nproc_per_node=job.ranks,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=MAX_RESTARTS,
        )
        env = job.environment()
        if self.settings == "tuned":
            argv += tuple(f"{name}={value}" for name, value in TUNED.items())
            env |= {
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "JOB_GROUP_TIMEOUT": f"{GROUP_TIMEOUT_S:g}",
            }
        return Drive(argv=(*argv, str(HOME / "harness" / "peers" / "nvrx_heartbeats.py")), env=env)

    def fidelity(self) -> tuple[str, ...]:
        return (
            "one node: no hot spare nodes, no rendezvous between machines",
            (
                "heartbeats with fixed timeouts; timeouts computed from observed steps need a"
                " checkpoint of their own"
            ),
        )
