"""Drop-replica: survivors continue without the lost rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from trainchaos.harness.compare.environments.stack import Value, Way
from trainchaos.harness.compare.stacks._recovery import RecoveryStack


class DropReplica(RecoveryStack):
    """This project's drop-replica: survivors continue at once with the same global batch; a
    replacement joins later.
    """

    title: ClassVar[str] = "built-in: drop-replica"
    way: ClassVar[Way] = "replica"
    strategy: ClassVar[str] = "drop-replica"
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {"--hang-timeout": (0.05, 0.1, 0.15)}
    tuned_because: ClassVar[str] = (
        "docs/recovery-rules.md, Silence: --hang-timeout takes the place of what is learned from"
        " the length of steps; the learned limit is 0.6 s at least. Checkpoints are saved"
        " synchronously, as all other stacks here save them."
    )
