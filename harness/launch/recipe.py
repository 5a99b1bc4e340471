"""How the rank processes of a run are started, on this machine and on nodes."""

from __future__ import annotations

from collections.abc import Iterable

from trainchaos.chaos import plugins
from trainchaos.chaos.scenario.model import Cell
from trainchaos.recovery.process.forkserver import LaunchRecipe
from trainchaos.recovery.process.local import rank_environment

WARM_MODULES = (
    "numpy.random",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "trainchaos.harness.rank.fault_agent",
    "trainchaos.harness.rank.training",
    "trainchaos.recovery.state.warmth",
    "trainchaos.harness.workloads.gpt",
    "trainchaos.harness.workloads._transformer",
    "trainchaos.harness.workloads.mlp",
)


def recipe(cells: Iterable[Cell] = ()) -> LaunchRecipe:
    """Start ranks as forks of a process that has imported everything, including the faults of
    ``cells``, or as new Pythons; one thread each, regardless of the user's environment.
    """
    kinds = sorted({fault.kind for cell in cells for fault in cell.scenario.faults})
    faults = tuple(plugins.module_of(plugins.FAULTS, kind) for kind in kinds)
    return LaunchRecipe(
        entry="trainchaos.harness.rank.rank:start",
        cold="trainchaos.harness.rank.rank",
        modules=(*WARM_MODULES, *faults),
        environment={**rank_environment(), "OMP_NUM_THREADS": "1"},
    )
