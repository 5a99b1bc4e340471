"""Which process is on which node.

Workers of the first generation are on the nodes of their ranks, spares on nodes without ranks first, then on the last
node (``chaos.topology``). A replacement goes to the first node that lacks a process it began with: a lost machine is
thought of as replaced by another one of the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from chaos.topology import Topology


class Placement:
    """Nodes of an arm's processes. ``spares``: that the job starts with."""

    def __init__(self, topology: Topology, *, spares: int) -> None:
        self._first = {
            "worker": [topology.node_of(rank) for rank in range(topology.ranks)],
            "spare": [topology.node_of_spare(index) for index in range(spares)],
        }
        self._full = Counter(node for nodes in self._first.values() for node in nodes)
        self._nodes = topology.nodes
        self._node_of: dict[str, int] = {}

    def place(self, process: str, role: str, living: Collection[str]) -> int:
        """The node of a process about to start. ``living``: those that are not gone and not about to go."""
        first = self._first.get(role, [])
        if first:
            node = first.pop(0)
        else:
            there = Counter(self._node_of[name] for name in living if name in self._node_of)
            nodes = range(self._nodes)
            lacking = [node for node in nodes if there[node] < self._full[node]]
            node = lacking[0] if lacking else min(nodes, key=lambda n: (there[n] - self._full[n], n))
        self._node_of[process] = node
        return node

    def on(self, node: int, living: Collection[str]) -> list[str]:
        """The living processes of a node, oldest first."""
        return [name for name, its in self._node_of.items() if its == node and name in living]
