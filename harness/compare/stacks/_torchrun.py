"""torchrun's command line for the common job, shared by ``none`` and ``torchrun``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainchaos.harness.compare.environments.stack import CommonJob, Drive, module

SCRIPT = "trainchaos.harness.peers.plain"


def drive(
    job: CommonJob, python: Path, *options: str, env: Mapping[str, str] | None = None
) -> Drive:
    """One agent on this machine that starts all ranks. ``options``: further options of torchrun."""
    argv = module(
        python,
        "torch.distributed.run",
        *options,
        "-m",
        SCRIPT,
        nproc_per_node=job.ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
    )
    return Drive(argv=argv, env=job.environment() | dict(env or {}))
