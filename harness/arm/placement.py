"""Decides which node each process runs on.

Workers of the first generation are on the nodes of their ranks, spares on nodes without ranks
first, then on the last node (``chaos.scenario.topology``). A replacement goes to the first node
that has fewer processes than it began with, since the platform, where it can, replaces a lost
machine by another one of the same number. Until that machine is there, spare nodes are filled like
the others; after them, the node that exceeds its number by the least takes more. A node on which
processes keep failing is chosen last: otherwise it would be chosen first, as the node that lacks a
process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from trainchaos.chaos.scenario.topology import Topology


class Placement:
    """The nodes of an arm's processes. ``spares``: the number that the job starts with."""

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
        """The node of a process about to start. ``living``: processes that are neither gone nor
        asked to end; ``usable``: nodes that take processes now, at least one; ``again``: a retry
        after a failed start; ``avoid``: nodes on which processes keep failing, used when there are
        no others.
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
