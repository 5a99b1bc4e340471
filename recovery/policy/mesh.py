"""Where a rank stands in its replica, and with whom it computes. Pure.

A replica is a grid of cells: shards (``fully_shard``) of pipeline stages, each of ranks that have a
part of every sequence (``context``), of tensor-parallel ranks. Cells are numbered with ``tensor``
fastest, then ``context``, ``pipeline`` and ``shard``: those that compute the same samples together
are neighbours. To everything else a cell is what a shard is (``recovery.policy.layout``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.recovery.policy.layout import Layout

Dim = Literal["shard", "pipeline", "context", "tensor"]
DIMS: tuple[Dim, ...] = ("shard", "pipeline", "context", "tensor")
"""The slowest first."""
SAME = "/same-as-"
"""Begins the name of the circle that sums gradients while passes go on. Its ranks may come to that
and to an exchange of a pass in another order than others: it shares no connections."""


class Place(NamedTuple):
    """The coordinates of a cell."""

    shard: int
    pipeline: int
    context: int
    tensor: int


class Mesh(BaseModel):
    """How a replica is made up: parts of each parameter that are gathered to be used (``shard``),
    stages of layers (``pipeline``), ranks that have a part of each sequence and the same parameters
    (``context``), ranks that compute each layer together (``tensor``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shard: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)

    @property
    def cells(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.shard * self.alike

    @property
    def alike(self) -> int:
        """Ranks that compute the same samples: neighbours, beginning at a multiple of it."""
        return self.pipeline * self.context * self.tensor

    @property
    def plain(self) -> bool:
        """Whether ranks share nothing but parameters: all of them compute samples of their own."""
        return self.alike == 1

    def size(self, dim: Dim) -> int:
        """Ranks along a dimension."""
        return int(getattr(self, dim))

    def place(self, cell: int) -> Place:
        """The coordinates of a cell."""
        rest, tensor = divmod(cell, self.tensor)
        rest, context = divmod(rest, self.context)
        shard, pipeline = divmod(rest, self.pipeline)
        return Place(shard=shard, pipeline=pipeline, context=context, tensor=tensor)

    def line(self, cell: int, dim: Dim) -> range:
        """The cells that differ from this one in one coordinate only, in its order."""
        faster = DIMS[DIMS.index(dim) + 1 :]
        stride = math.prod(self.size(each) for each in faster)
        first = cell - getattr(self.place(cell), dim) * stride
        return range(first, first + self.size(dim) * stride, stride)

    def leads(self, rank: int) -> bool:
        """Whether a rank is the first of those that compute the same samples: it counts them."""
        return rank % self.alike == 0

    def says_loss(self, rank: int) -> bool:
        """Whether a loss of a rank's samples is known to it, and added up from it: the first tensor
        ranks of the last stage, each with that of its part of the sequences.
        """
        place = self.place(rank % self.alike)
        return place.pipeline == self.pipeline - 1 and not place.tensor

    def draws(self, rank: int) -> int:
        """The number by which a rank seeds its random generators: tensor ranks draw alike, and
        those of other parts of a sequence do not.
        """
        return rank - rank % self.tensor

    def shares(self, ranks: int) -> int:
        """How many ranks' samples differ, of so many ranks; also: whose share a rank has."""
        return ranks // self.alike

    def described(self) -> str:
        """For people, such as ``tensor 2 x pipeline 2``."""
        return " x ".join(f"{dim} {self.size(dim)}" for dim in DIMS if self.size(dim) > 1) or "1"


def circles_of(mesh: Mesh, layout: Layout, rank: int) -> dict[str, Sequence[int]]:
    """The ranks that a rank meets with, by the name of each circle: everyone, the holders of its
    cell, its line of each of ``DIMS``, and, where they are more than the holders, all that hold the
    same parameters, over which gradients are summed (``SAME``). All ranks have them in this order:
    each waits for the other members of one circle before it comes to the next.
    """
    cell, replica = layout.shard_of(rank), layout.replica_of(rank)
    found: dict[str, Sequence[int]] = {
        "": range(layout.world),
        f"/shard-{cell}": layout.holders(cell),
    }
    for dim in DIMS:
        line, base = mesh.line(cell, dim), replica * layout.shards
        ranks = range(line.start + base, line.stop + base, line.step)
        plain = dim == "shard" and mesh.plain
        found[f"/replica-{replica}" if plain else f"/{dim}-of-{ranks[0]}"] = ranks
    if mesh.context > 1:
        twins = mesh.line(cell, "context")
        same = sorted(rank for twin in twins for rank in layout.holders(twin))
        found[f"{SAME}{twins[0]}"] = same
    return found
