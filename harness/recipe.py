"""How the rank processes of a run come into being, on this machine and on nodes."""

from __future__ import annotations

from recovery.local import rank_environment
from recovery.nodes.node import Recipe

WARM_MODULES = (
    "numpy.random", "torch", "torch._dynamo", "torch.distributed.checkpoint", "harness.rank_faults", "harness.training",
    "harness.workloads.gpt", "harness.workloads._transformer", "harness.workloads.mlp",
)  # fmt: skip


def recipe() -> Recipe:
    """Forks of a process that has imported everything, or Python anew; one thread each, whatever the user's shell
    says."""
    return Recipe(
        entry="harness.rank:start", cold="harness.rank", modules=WARM_MODULES,
        environment={**rank_environment(), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
