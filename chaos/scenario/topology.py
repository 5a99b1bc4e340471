"""Computes the placement of ranks on nodes, of nodes in racks, and of ranks in replicas."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks over nodes in blocks, nodes over racks in blocks.

    With 5 ranks on 2 nodes, ranks 0 to 2 are on node 0 and ranks 3 and 4 on node 1. ``shards``:
    ranks that hold one copy of the model together; ranks are numbered replica by replica.
    """

    ranks: int
    nodes: int = 1
    nodes_per_rack: int = 1
    shards: int = 1

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.ranks // self.shards

    def ranks_of(self, replica: int) -> tuple[int, ...]:
        """The ranks that hold one copy."""
        return tuple(range(replica * self.shards, (replica + 1) * self.shards))

    def whole(self, ranks: Collection[int]) -> int:
        """How many replicas have all their ranks among these."""
        return sum(
            all(rank in ranks for rank in self.ranks_of(each)) for each in range(self.replicas)
        )

    @property
    def ranks_per_node(self) -> int:
        """Ranks on a full node."""
        return max(1, math.ceil(self.ranks / self.nodes))

    @property
    def racks(self) -> int:
        """Racks that hold at least one node."""
        return math.ceil(self.nodes / self.nodes_per_rack)

    def node_of(self, rank: int) -> int:
        """The node of a rank; ranks beyond the last block (a job that grew) are on the
        last node.
        """
        return min(rank // self.ranks_per_node, self.nodes - 1)

    @property
    def spare_nodes(self) -> tuple[int, ...]:
        """Nodes without ranks: standby nodes, with or without spares."""
        return tuple(range(self.node_of(self.ranks - 1) + 1, self.nodes))

    def node_of_spare(self, index: int) -> int:
        """The node of a spare: spare nodes are filled first, one after the other, so that each
        replaces a lost one; then the last node with ranks, and backwards, so that a lost node
        rarely takes both.
        """
        place, per = self.spare_nodes, self.ranks_per_node
        if index < len(place) * per:
            return place[index // per]
        busy = self.nodes - len(place)
        return busy - 1 - (index - len(place) * per) % busy

    def rack_of(self, node: int) -> int:
        """The rack of a node."""
        return node // self.nodes_per_rack

    def ranks_on(self, node: int) -> tuple[int, ...]:
        """The ranks on a node; a node that the ranks do not reach has none."""
        return tuple(rank for rank in range(self.ranks) if self.node_of(rank) == node)

    def nodes_in(self, rack: int) -> tuple[int, ...]:
        """The nodes of a rack."""
        return tuple(node for node in range(self.nodes) if self.rack_of(node) == rack)
