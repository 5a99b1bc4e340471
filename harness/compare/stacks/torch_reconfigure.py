"""torch's own fault tolerance: a process group that gets other members while its processes live."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import (
    CommonJob,
    Drive,
    Requirements,
    Stack,
    Value,
    Way,
    module,
)

RESTARTS = 3
GROUP, REFORM = "init_process_group(timeout) s", "_reconfigure(timeout) s"
JOIN = "launcher's wait for a member that does not answer s"


class TorchReconfigure(Stack):
    """``init_process_group(enable_reconfigure=True)`` and a small launcher.

    ``default`` has the timeouts of torch's own test of it
    (``test/distributed/test_c10d_fault_tolerance.py``).
    """

    title: ClassVar[str] = "torch 2.15.0, reconfigured process group"
    requirements: ClassVar[Requirements | None] = Requirements(
        pins=("torch==2.15.0",), probe="torch.distributed"
    )
    way: ClassVar[Way] = "replica"
    plain: ClassVar[Mapping[str, Value]] = {GROUP: 30, REFORM: 30, JOIN: 1}
    advised: ClassVar[Mapping[str, Value]] = {GROUP: 0.25, REFORM: 2, JOIN: 0.25}
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        GROUP: (0.1, 0.15, 0.25),
        JOIN: (0.1,),
    }
    tuned_because: ClassVar[str] = (
        "torch has no page about it yet: its docstrings (torch.distributed._reconfigure,"
        " init_process_group) name two timeouts, that of collectives and that of a"
        " reconfiguration. On gloo the first alone says when a rank that hangs is given up. The"
        " launcher is ours: how long it waits for a member that does not answer after others"
        " found the group broken is part of the same time. Both are shortened to what one machine"
        " allows."
    )

    def chosen(self) -> Mapping[str, object]:
        return {**self.values, "restarts of each rank": RESTARTS}

    def drive(self, job: CommonJob, python: Path) -> Drive:
        argv = module(
            python,
            "trainchaos.harness.peers.torch_reconfigure",
            "--",
            "--group-timeout",
            f"{self.values[GROUP]:g}",
            "--reconfigure-timeout",
            f"{self.values[REFORM]:g}",
            ranks=job.ranks,
            restarts=RESTARTS,
            join_limit=f"{self.values[JOIN]:g}",
        )
        return Drive(argv=argv, env=job.environment())

    def fidelity(self) -> tuple[str, ...]:
        return (
            (
                "torch gives the group and nothing else: the launcher, the agreement on members"
                " through a TCPStore, and the broadcast of the state are this project's, as small"
                " as they can be"
            ),
            (
                "gloo's abort does nothing, and ranks that wait for each other would wait for the"
                " timeout after a kill too: a rank that finds the group broken first makes a group"
                " of itself alone, which closes its connections"
            ),
            (
                "gradients, the loss and the word that a rank waits to join go in one all-reduce,"
                " without DistributedDataParallel, which keeps the size that the group had first"
            ),
            "a hung rank is killed by the launcher and started again",
            "the launcher, which holds the store, is never hit, and has no standby",
            "with a GPU for each rank the backend is nccl2, which has not been tried here",
        )
