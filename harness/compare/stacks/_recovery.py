"""Base of this project's strategies: ``python -m recovery.run`` for the common job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from harness.compare.environments.stack import CHECKPOINTS, ROOT, CommonJob, Drive, Stack

SCRIPT = ROOT / "harness" / "peers" / "ours.py"


class RecoveryStack(Stack):
    """A strategy of ``recovery``, started through its command line like any other stack."""

    ours: ClassVar[bool] = True
    strategy: ClassVar[str] = ""

    def chosen(self) -> Mapping[str, object]:
        """Options of ``python -m recovery.run``."""
        return {"--strategy": self.strategy, **self.values}

    def drive(self, job: CommonJob, python: Path) -> Drive:
        """The supervisor, which forks the ranks."""
        options = [word for name, value in self.chosen().items() for word in (name, str(value))]
        argv = (
            str(python),
            "-m",
            "recovery.run",
            "--ranks",
            str(job.ranks),
            "--device",
            "cpu",
            "--checkpoint-dir",
            f"$CHAOS_SCRATCH/{CHECKPOINTS}",
            "--every",
            str(job.every),
            "--events",
            "$CHAOS_SCRATCH/events",
            *options,
            str(SCRIPT),
        )
        return Drive(argv=argv, env=job.environment())
