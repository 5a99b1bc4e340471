"""Elastic restart: torchrun starts all ranks again, and they load the newest checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainchaos.harness.compare.environments.stack import CommonJob, Drive, Stack
from trainchaos.harness.compare.stacks import _torchrun

DEFAULT_RESTARTS = 3
"""As in the example of a fault-tolerant job in torchrun's documentation."""
TUNED: Mapping[str, Any] = {
    "--max-restarts": 100,
    "--shutdown-timeout": 1,
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "init_process_group(timeout=)": 10.0,
}


class Torchrun(Stack):
    """torchrun with restarts: when a rank fails, all ranks are started again and load the newest
    checkpoint.

    The script is plain DistributedDataParallel with ``torch.save`` each so many steps, as the
    documentation of torchrun asks for (``harness/peers/plain.py``).
    """

    title: ClassVar[str] = "torchrun: elastic restart and checkpoint"
    tuned_because: ClassVar[str] = (
        "A restarted job must not read its predecessor's addresses:"
        " TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (pytorch #135712). A hang ends when a collective"
        " does: the group's timeout is 10 s, not 30 minutes (init_process_group, timeout), longer"
        " than ranks that start on busy cores are apart. A stopped rank does not answer SIGTERM: it"
        " is waited for 1 s, not 30 (torchrun --shutdown-timeout). Restarts enough that they do not"
        " run out. The agent looks each 0.1 s by default (--monitor-interval)."
    )

    def chosen(self) -> Mapping[str, object]:
        """Options of torchrun, its environment, and of the script."""
        return TUNED if self.settings == "tuned" else {"--max-restarts": DEFAULT_RESTARTS}

    def drive(self, job: CommonJob, python: Path) -> Drive:
        """One agent of torchrun, the c10d rendezvous."""
        if self.settings == "default":
            return _torchrun.drive(job, python, "--max-restarts", str(DEFAULT_RESTARTS))
        options = [
            word for name in TUNED if name.startswith("--") for word in (name, str(TUNED[name]))
        ]
        env = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "JOB_GROUP_TIMEOUT": str(TUNED["init_process_group(timeout=)"]),
        }
        return _torchrun.drive(job, python, *options, env=env)
