"""Ranks on nodes that are processes of this machine, each with an agent, an address and connections
of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.nodes.cluster import NodesSession, nodes_session
from trainchaos.harness.launch.nodes.loopback import LoopbackPlatform
from trainchaos.harness.launch.nodes.untainted import lacks_untainted
from trainchaos.harness.launch.storage import lacks_mount


class Agents(Launcher):
    """Nodes as they are under ``docker`` and ``slurm``, without either: one agent a node, as a
    process of this machine with a loopback address of its own. Their death, silence and return are
    real; their network is not.
    """

    emulates: ClassVar[str] = ""

    offers: ClassVar[frozenset[Need]] = frozenset(
        {Need.LINKS, Need.STORE_PROCESS, Need.COORDINATOR_PROCESS, Need.MOUNT, Need.NODES}
    )

    def lacks(self, need: Need) -> str | None:
        """Privileges."""
        return lacks_mount() if need is Need.MOUNT else None

    def session(
        self, cells: Sequence[Cell], run: RunDirectory
    ) -> AbstractContextManager[NodesSession]:
        """Start the agents."""
        return nodes_session(cells, run, LoopbackPlatform)

    def missing(self, cell: Cell) -> str | None:
        """CUDA devices, cores or memory a cell asks for and this machine lacks."""
        from trainchaos.harness.launch.devices import missing

        return missing(cell) or lacks_untainted(cell)
