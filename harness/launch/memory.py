"""In-memory checkpoints of an arm of real processes: starts the keepers and configures the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.recovery.checkpoint.memory.keepers import KeeperHost, Keepers
from trainchaos.recovery.policy.jobconfig import InMemory


def keepers_for(setup: ArmSetup, keeper_host: Callable[[], KeeperHost]) -> Keepers | None:
    """Start the keepers, if the cell has in-memory checkpoints. Raises InfrastructureError."""
    scenario = setup.cell.scenario
    spec = scenario.workload.checkpoint.in_memory
    if spec is None:
        return None
    return Keepers(
        keeper_host(),
        job=_job(setup),
        nodes=scenario.topology.nodes,
        limit_bytes=spec.limit_bytes,
        replicate=spec.replicate,
    )


def in_memory(setup: ArmSetup, keepers: Keepers | None, node: int) -> InMemory | None:
    """Configuration for a node's ranks; None if the cell has no in-memory checkpoints."""
    if keepers is None:
        return None
    spec = setup.cell.scenario.workload.checkpoint.in_memory
    assert spec is not None
    return InMemory(socket=keepers.socket_of(node), job=_job(setup), every=spec.every)


def _job(setup: ArmSetup) -> str:
    return f"{setup.run.root.name}/{setup.id}"
