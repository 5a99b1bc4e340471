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
from collections.abc import Collection, Mapping
from types import MappingProxyType

from trainchaos.chaos.scenario.topology import Topology
from trainchaos.harness.launch.places.seats import planned, rooms, seats

NO_LIMITS: Mapping[int, int] = MappingProxyType({})


class Placement:
    """The nodes of an arm's processes. ``spares``: the number that the job starts with; ``room``:
    processes that a node takes, where taints limit that. If they leave too few seats, processes
    start where the topology says; launchers refuse such an arm (``harness.launch.places.seats``).
    """

    def __init__(
        self, topology: Topology, *, spares: int, room: Mapping[int, int] = NO_LIMITS
    ) -> None:
        first = seats(topology, spares=spares, room=room) or planned(topology, spares=spares)
        self._first = {"worker": list(first.workers), "spare": list(first.spares)}
        self._full = first.full
        most = rooms(topology, spares=spares)
        self._room = Counter({node: room.get(node, count) for node, count in most.items()})
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
