"""Hot-spare: a spare takes the lost rank's place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import CommonJob, Value, Way
from trainchaos.harness.compare.stacks._recovery import RecoveryStack

SPARES = 1
"""The default of the strategy."""


class HotSpare(RecoveryStack):
    """This project's hot-spare: a waiting process takes the lost rank's place with a live peer's
    state.

    It holds one more process than the other stacks; the price is its memory, as it trains nothing
    while it waits.
    """

    title: ClassVar[str] = "built-in: hot-spare"
    way: ClassVar[Way] = "spare"
    strategy: ClassVar[str] = "hot-spare"
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {"--hang-timeout": (0.05, 0.1, 0.15)}
    tuned_because: ClassVar[str] = (
        "docs/recovery-rules.md, Silence: --hang-timeout takes the place of what is learned from"
        " the length of steps; the learned limit is 0.6 s at least. Checkpoints are saved"
        " synchronously, as all other stacks here save them."
    )

    def provisioned(self, job: CommonJob) -> int:
        """One spare more than ranks."""
        return job.ranks + SPARES

    def fidelity(self) -> tuple[str, ...]:
        """The spare is an extra process."""
        return (
            "one process more than the job has ranks is kept ready, on the same cores as the ranks",
        )
