"""How the rank processes of a run are started, on this machine and on nodes."""

from __future__ import annotations

from collections.abc import Iterable

from chaos import plugins
from chaos.scenario.model import Cell
from recovery.process.local import rank_environment
from recovery.process.node import LaunchRecipe

FAULTS = "chaos.faults"
WARM_MODULES = (
    "numpy.random",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "harness.rank.fault_agent",
    "harness.rank.training",
    "recovery.rank.warmth",
    "harness.workloads.gpt",
    "harness.workloads._transformer",
    "harness.workloads.mlp",
)


def recipe(cells: Iterable[Cell] = ()) -> LaunchRecipe:
    """Start ranks as forks of a process that has imported everything, including the faults of
    ``cells``, or as new Pythons; one thread each, regardless of the user's environment.
    """
    kinds = sorted({fault.kind for cell in cells for fault in cell.scenario.faults})
    faults = tuple(plugins.module_of(FAULTS, kind) for kind in kinds)
    return LaunchRecipe(
        entry="harness.rank.rank:start",
        cold="harness.rank.rank",
        modules=(*WARM_MODULES, *faults),
        environment={**rank_environment(), "OMP_NUM_THREADS": "1"},
    )
