"""Survivors go on without the lost rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from harness.stacks._recovery import RecoveryStack


class DropReplica(RecoveryStack):
    """This project's drop-replica: survivors go on at once with the same global batch; a replacement joins later."""

    title: ClassVar[str] = "built-in: drop-replica"
    strategy: ClassVar[str] = "drop-replica"
    tuned: ClassVar[Mapping[str, str]] = {"--saves": "mode=async"}
    tuned_because: ClassVar[str] = (
        "docs/recovery.md, Checkpoints: with mode=async training waits for a copy of the state only, and a thread "
        "writes it."
    )
