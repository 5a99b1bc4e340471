"""A spare takes the lost rank's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from harness.stack import CommonJob
from harness.stacks._recovery import RecoveryStack

SPARES = 1
"""The default of the strategy."""


class HotSpare(RecoveryStack):
    """This project's hot-spare: a waiting process takes the lost rank's place with a live peer's state.

    It holds one process more than the others; its memory is the price, and it trains nothing while it waits.
    """

    title: ClassVar[str] = "built-in: hot-spare"
    strategy: ClassVar[str] = "hot-spare"
    tuned: ClassVar[Mapping[str, str]] = {"--saves": "mode=async"}
    tuned_because: ClassVar[str] = (
        "docs/recovery.md, Checkpoints: with mode=async training waits for a copy of the state only, and a thread "
        "writes it."
    )

    def provisioned(self, job: CommonJob) -> int:
        """One spare more than ranks."""
        return job.ranks + SPARES

    def fidelity(self) -> tuple[str, ...]:
        """The spare is a process of its own."""
        return ("one process more than the job has ranks is kept ready, on the same cores as the ranks",)
