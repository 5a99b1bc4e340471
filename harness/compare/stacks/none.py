"""No recovery at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import CommonJob, Drive, Stack, Way
from trainchaos.harness.compare.stacks import _torchrun


class NoRecovery(Stack):
    """Plain DistributedDataParallel under torchrun without restarts: the job ends at its first
    failure.

    Its step time is the reference for the other stacks' step times. It writes the same checkpoints.
    """

    title: ClassVar[str] = "plain DDP, no recovery"
    way: ClassVar[Way] = "none"
    tuned_because: ClassVar[str] = "There is nothing to choose: tuned is the same as default."

    def chosen(self) -> Mapping[str, object]:
        """torchrun's own default, made explicit."""
        return {"--max-restarts": 0}

    def drive(self, job: CommonJob, python: Path) -> Drive:
        """torchrun without restarts."""
        return _torchrun.drive(job, python, "--max-restarts", "0")
