"""What one rank is told about its job."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class JobConfig(BaseModel):
    """What a rank must know. ``world``: full world size; ``samples``: size of the data set; ``batch``: see Strategy.

    ``checkpoint_every``: steps, 0 for never; ``collective_timeout_s``: a last resort, the supervisor is faster.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: str
    world: int
    steps: int
    global_batch: int
    samples: int
    seed: int
    batch: Literal["constant", "shrink"] = "constant"
    backend: Literal["gloo", "nccl"] = "gloo"
    checkpoint_dir: Path | None
    checkpoint_every: int
    checkpoint_keep: int
    device: str = "cpu"
    collective_timeout_s: float = 300.0
