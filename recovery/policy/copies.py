"""Who sends its state to whom as a generation forms. Pure.

A broadcast reaches every holder of a part, whether it lacks the state or not, and the first one
sends ceil(log2 n) times as much as there is, as gloo's broadcast is a binomial tree. Where few lack
the state, each gets it from a holder of its own, and the others go on. A receiver has all of its
state from one holder: of replicas that differ unnoticed none is mixed with another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainchaos.recovery.policy.layout import Layout


@dataclass(frozen=True, kw_only=True)
class CopyPlan:
    """``copies``: receiving rank -> the rank that sends it its part; ``finish``: the step that some
    have to finish first (0: none); ``holders``: by shard, the ranks that have it; ``direct``: the
    shards of which copies go from rank to rank, and not to all.
    """

    layout: Layout
    copies: Mapping[int, int] = field(default_factory=dict)
    finish: int = 0
    holders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    direct: frozenset[int] = frozenset()

    def spread(self) -> CopyPlan:
        """The same with several senders, for each shard where that moves less than a broadcast."""
        copies, direct = dict(self.copies), set(self.direct)
        lack: dict[int, list[int]] = {}
        for rank in self.copies:
            lack.setdefault(self.layout.shard_of(rank), []).append(rank)
        for shard, lacking in lack.items():
            holders = self.holders[shard]
            if each_sends(lacking, holders) <= broadcast_sends(lacking, holders):
                direct.add(shard)
                for place, rank in enumerate(lacking):
                    copies[rank] = holders[place % len(holders)]
        return replace(self, copies=copies, direct=frozenset(direct))

    def orders(self) -> list[dict[str, Any]]:
        """What each rank is told, as fields of ``recovery.transport.wire.StateSource``."""
        common = {self.layout.shard_of(giver): giver for giver in self.copies.values()}
        feeds: dict[int, list[int]] = {}
        for rank, giver in self.copies.items():
            feeds.setdefault(giver, []).append(rank)
        return [self._order(rank, common, feeds) for rank in range(self.layout.world)]

    def _order(
        self, rank: int, common: Mapping[int, int], feeds: Mapping[int, list[int]]
    ) -> dict[str, Any]:
        shard, receives = self.layout.shard_of(rank), rank in self.copies
        if shard not in self.direct:
            return {"source": common.get(shard, -1), "receives": receives}
        source = self.copies.get(rank, rank if rank in feeds else -1)
        fed = feeds.get(rank, [])
        return {"source": source, "receives": receives, "direct": True, "feeds": fed}


def each_sends(lacking: Sequence[int], holders: Sequence[int]) -> int:
    """How often a holder sends its state at the most, from rank to rank."""
    return math.ceil(len(lacking) / len(holders))


def broadcast_sends(lacking: Sequence[int], holders: Sequence[int]) -> int:
    """How often the first holder sends its state in a broadcast."""
    return math.ceil(math.log2(len(lacking) + len(holders)))
