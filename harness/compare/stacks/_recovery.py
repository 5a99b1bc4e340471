"""Base of this project's strategies: ``python -m trainchaos.recovery.run`` for the common job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.environments.stack import (
    CHECKPOINTS,
    CommonJob,
    Drive,
    Stack,
    module,
)

SCRIPT = HOME / "harness" / "peers" / "ours.py"


class RecoveryStack(Stack):
    """A strategy of ``recovery``, started through its command line like any other stack."""

    ours: ClassVar[bool] = True
    strategy: ClassVar[str] = ""

    def chosen(self) -> Mapping[str, object]:
        """Options of ``python -m trainchaos.recovery.run``."""
        return {"--strategy": self.strategy, **self.values}

    def drive(self, job: CommonJob, python: Path) -> Drive:
        """The supervisor, which forks the ranks."""
        options = [word for name, value in self.chosen().items() for word in (name, str(value))]
        argv = module(
            python,
            "trainchaos.recovery.run",
            *options,
            SCRIPT,
            ranks=job.ranks,
            device="cpu",
            checkpoint_dir=f"$CHAOS_SCRATCH/{CHECKPOINTS}",
            every=job.every,
            events="$CHAOS_SCRATCH/events",
        )
        return Drive(argv=argv, env=job.environment())
