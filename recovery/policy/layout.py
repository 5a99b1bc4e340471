"""Which rank holds which part of the model. Pure.

``shards`` ranks hold one copy of the model together: a replica. Ranks are numbered replica by
replica, so that rank r is shard ``r % shards`` of replica ``r // shards``. Data-parallel training
(ddp) is ``shards == 1``, fully sharded (fsdp) ``shards == world``, hybrid (hsdp) anything between.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which rank holds which shard. Raises ValueError when ``world`` is not a multiple of
    ``shards``.
    """

    world: int
    shards: int = 1

    def __post_init__(self) -> None:
        if self.shards < 1 or self.world % self.shards:
            raise ValueError(f"{self.world} ranks do not make replicas of {self.shards} shards")

    @property
    def replicas(self) -> int:
        """Complete copies of the model."""
        return self.world // self.shards

    def replica_of(self, rank: int) -> int:
        """Which copy a rank holds a part of."""
        return rank // self.shards

    def shard_of(self, rank: int) -> int:
        """Which part of its copy a rank holds."""
        return rank % self.shards

    def replica(self, number: int) -> range:
        """Ranks of one copy, by shard."""
        return range(number * self.shards, (number + 1) * self.shards)

    def holders(self, shard: int) -> range:
        """Ranks that hold this part, one of each copy."""
        return range(shard, self.world, self.shards)
