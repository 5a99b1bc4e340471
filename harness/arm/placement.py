"""Which process is on which node.

Workers of the first generation are on the nodes of their ranks, spares on nodes without ranks
first, then on the last node (``chaos.scenario.topology``). A replacement goes to the first node
that lacks a process it began with, since a lost machine is replaced by another one of the same
number where the platform has one. As long as it is not there, spare nodes are filled as others are,
and then whoever is least over its number takes more. A node on which processes keep failing is the
last to be chosen: it would be the first to lack some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from chaos.scenario.topology import Topology


class Placement:
    """Nodes of an arm's processes. ``spares``: that the job starts with."""

    def __init__(self, topology: Topology, *, spares: int) -> None:
        self._first = {
            "worker": [topology.node_of(rank) for rank in range(topology.ranks)],
            "spare": [topology.node_of_spare(index) for index in range(spares)],
        }
        self._full = Counter(node for nodes in self._first.values() for node in nodes)
        self._room = self._full | Counter(
            dict.fromkeys(topology.spare_nodes, topology.ranks_per_node)
        )
        self._node_of: dict[str, int] = {}

    def place(
        self,
        process: str,
        role: str,
        living: Collection[str],
        usable: Collection[int],
        *,
        again: bool = False,
        avoid: Collection[int] = (),
    ) -> int:
        """The node of a process about to start. ``living``: those that are not gone and not about
        to go; ``usable``: nodes that take processes now, at least one; ``again``: another try for
        one that could not be started; ``avoid``: nodes on which processes keep failing, used when
        there are no others.
        """
        first = self._first.get(role, []) if not again else []
        node = first.pop(0) if first else None
        if node is None or node not in usable:
            there = Counter(self._node_of[n] for n in living if n in self._node_of)
            node = self._best(there, sorted(set(usable).difference(avoid) or usable))
        self._node_of[process] = node
        return node

    def _best(self, there: Counter[int], usable: list[int]) -> int:
        lacking = [node for node in usable if there[node] < self._full[node]]
        return (
            lacking[0]
            if lacking
            else min(usable, key=lambda node: (there[node] - self._room[node], node))
        )

    def node_of(self, process: str) -> int | None:
        """The node a process was placed on."""
        return self._node_of.get(process)

    def on(self, node: int, living: Collection[str]) -> list[str]:
        """The living processes of a node, oldest first."""
        return [name for name, its in self._node_of.items() if its == node and name in living]
