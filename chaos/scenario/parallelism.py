"""Scenario model of how the ranks of a job share its model. See ``chaos.scenario.workload``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainchaos.chaos.scenario.fault import Strict
from trainchaos.chaos.scenario.forms import Form


class HybridShape(Strict):
    """``replicas`` copies of the model, each over ``shards`` ranks."""

    replicas: int = Field(ge=1, description="copies of the model")
    shards: int = Field(ge=1, description="ranks that hold one copy together")


class Hybrid(Strict):
    """Hybrid sharding: copies of the model, each spread over several ranks."""

    hsdp: HybridShape

    @property
    def cells(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.hsdp.shards

    def misfit(self, ranks: int) -> str | None:
        """Why it is not the shape of so many ranks."""
        replicas, shards = self.hsdp.replicas, self.hsdp.shards
        if replicas * shards == ranks:
            return None
        fits = [(ranks // size, size) for size in range(2, ranks) if ranks % size == 0]
        shapes = " or ".join(f"{{replicas: {copies}, shards: {size}}}" for copies, size in fits)
        return (
            f"parallelism hsdp with {replicas} replicas of {shards} shards is"
            f" {replicas * shards} ranks, not {ranks}: use ranks: {replicas * shards}"
            + (f", or {shapes}" if shapes else "")
        )


class MeshShape(Strict):
    """A mesh: ``replicate`` copies of the model, each over a grid of ranks. See
    ``recovery.policy.mesh``.
    """

    replicate: int = Field(default=1, ge=1, description="copies of the model")
    shard: int = Field(default=1, ge=1, description="parts of each parameter (fully_shard)")
    pipeline: int = Field(default=1, ge=1, description="stages of layers")
    context: int = Field(default=1, ge=1, description="parts of each sequence")
    tensor: int = Field(default=1, ge=1, description="ranks that compute each layer together")
    schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b", description="the order of passes in a pipeline"
    )
    microbatches: int = Field(
        default=4, ge=1, description="parts of a rank's samples in a pipeline, at most"
    )

    @property
    def alike(self) -> int:
        """Ranks that compute the same samples together."""
        return self.pipeline * self.context * self.tensor

    @property
    def cells(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.shard * self.alike

    @property
    def grid(self) -> dict[str, int]:
        """A replica, as ``recovery.policy.mesh.Mesh`` takes it."""
        dims = ("shard", "pipeline", "context", "tensor")
        return {dim: getattr(self, dim) for dim in dims}

    def misfit(self, ranks: int) -> str | None:
        """Why it is not the shape of so many ranks."""
        made = self.replicate * self.cells
        if made == ranks:
            return None
        sizes = " x ".join(
            f"{dim} {n}" for dim, n in {"replicate": self.replicate, **self.grid}.items()
        )
        better = f", or replicate: {ranks // self.cells}" if ranks % self.cells == 0 else ""
        return f"parallelism of {sizes} is {made} ranks, not {ranks}: use ranks: {made}{better}"


Parallelism = Annotated[
    Literal["ddp", "fsdp"] | Hybrid | MeshShape,
    Form(
        "ddp, fsdp, {hsdp: {replicas: R, shards: S}}, or a mesh: {replicate: R, shard: S, pipeline:"
        " P, context: C, tensor: T}",
        hsdp=Hybrid,
        replicate=MeshShape,
    ),
]
