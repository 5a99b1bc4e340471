"""Checkpoint-restart: all ranks restart from the newest good checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import Value, Way
from trainchaos.harness.compare.stacks._recovery import RecoveryStack


class CheckpointRestart(RecoveryStack):
    """This project's checkpoint-restart: all ranks are forked again and restore the newest
    checkpoint that verifies.
    """

    title: ClassVar[str] = "built-in: checkpoint-restart"
    way: ClassVar[Way] = "restart"
    strategy: ClassVar[str] = "checkpoint-restart"
    advised: ClassVar[Mapping[str, Value]] = {"--memory-checkpoints": "2"}
    tuned_because: ClassVar[str] = (
        "docs/recovery-rules.md, In memory: a checkpoint in memory is cheap enough for every few"
        " steps, so that a lost rank costs the steps since the last one; docs/performance.md"
        " measures each second step."
    )
