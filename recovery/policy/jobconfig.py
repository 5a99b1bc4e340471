"""The configuration that one rank gets about its job."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainchaos.recovery.policy.mesh import Mesh

FORM_TIMEOUT_S = 300.0
COLLECTIVE_TIMEOUT_S = 86_400.0
"""A collective lasts until the slowest member arrives, which the supervisor judges."""
LOOPBACK = "127.0.0.1"
MOST_SPARES = 64
Sync = Literal["none", "live"]
"""Of spares: ``live`` ones follow the job step by step."""


class SpareSync(NamedTuple):
    """How spares are kept up to date. ``lag``: steps that may wait for a live one; with more it is
    dropped until a copy later; ``rehearse``: a spare trains a step that counts for nothing before
    it is ready.
    """

    sync: Sync = "none"
    lag: int = 4
    rehearse: bool = False

    def misfit(self, ranks: int, shards: int, spares: int) -> str:
        """Why it does not fit a job of so many ranks, ``shards`` of which hold the model together,
        and so many spares; "" where it does.
        """
        if shards > 1 and self.rehearse:
            return "rehearse=true serves models that each rank holds whole: no --shards or --mesh"
        if shards == 1 or self.sync != "live":
            return ""
        if ranks == shards:
            return (
                f"sync=live: the {ranks} ranks hold one copy of the model, and a spare is compared"
                " with another rank that holds the same part: use two copies or more, or sync=none"
            )
        if spares < shards:
            enough = f"--spares {shards} or more, or " if shards <= MOST_SPARES else ""
            return (
                f"sync=live: a spare follows one of the {shards} parts of the model, and a part"
                f" that no spare follows would find none: use {enough}sync=none"
            )
        return ""


class InMemory(BaseModel):
    """Checkpoints in memory. ``socket``: of the keeper on this process's node; ``job``: the name of
    the run at its keepers; ``every``: steps between saves, a time or "auto" (see
    ``recovery.policy.interval``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    socket: str
    job: str
    every: int | str


class NetworkAddresses(BaseModel):
    """Addresses where a rank and its peers connect. ``store_host``: where the key-value store
    listens; ``address``: where this rank listens, numeric; "": on the loopback interface, or that
    of GLOO_SOCKET_IFNAME.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    store_host: str = LOOPBACK
    address: str = ""


class Saves(BaseModel):
    """How checkpoints are written. ``mode``: with ``async`` training only waits for a copy in
    memory; ``sharded``: ranks that hold the same state share the writing (those of a sharded model
    always do); ``delta``: one full checkpoint in so many, with only changes between them;
    ``mtbf_s``: for an interval of ``auto``, None: as observed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["sync", "async"] = "sync"
    sharded: bool = False
    delta: int = Field(default=1, ge=1)
    mtbf_s: float | None = Field(default=None, gt=0)


Backend = Literal["gloo", "nccl"]


class Exchange(NamedTuple):
    """How ranks exchange tensors. ``shared_gpus``: several ranks of NCCL are on one GPU, each as if
    on a host of its own (see ``recovery.collectives.nccl``).
    """

    backend: Backend
    shared_gpus: bool = False


def exchange_of(asked: Literal["auto", "gloo", "nccl"], *, own_gpus: bool) -> Exchange:
    """The exchange for what was asked for; ``own_gpus``: every process has a GPU of its own.
    ``auto``: NCCL then, otherwise gloo, which copies through the host.
    """
    if asked == "auto":
        asked = "nccl" if own_gpus else "gloo"
    return Exchange(asked, shared_gpus=asked == "nccl" and not own_gpus)


Determinism = Literal["default", "elastic"]


class RankSettings(BaseModel):
    """What its supervisor alone says of a process. ``world``: full world size; ``shards``: ranks
    that hold one copy of the model (see ``recovery.policy.layout``); ``mesh``: how those are
    arranged, None: all along ``shard``; ``batch``: see Strategy; ``shared_gpus``: see Exchange;
    ``memory``: checkpoints in memory besides, None: none; ``fresh``: the job began with initial
    values, and checkpoints of earlier jobs are left alone; ``job_id``: the same in all processes of
    a job, and in no other (see ``recovery.checkpoint.files.fence``); ``sync``, ``sync_lag``,
    ``rehearse`` (of spares alone): see SpareSync.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    process: str
    world: int
    shards: int = 1
    mesh: Mesh | None = None
    batch: Literal["constant", "shrink"] = "constant"
    backend: Backend = "gloo"
    shared_gpus: bool = False
    checkpoint_dir: Path | None = None
    verify_every: int | None = None
    nonfinite: Literal["retry", "skip", "rollback"] = "retry"
    sync: Sync = "none"
    sync_lag: int = 4
    rehearse: bool = False
    memory: InMemory | None = None
    net: NetworkAddresses = NetworkAddresses()
    device: str = "cpu"
    fresh: bool = False
    job_id: str = ""


class JobConfig(RankSettings):
    """Configuration of a rank. ``samples``: size of the data set; ``determinism``: ``elastic``
    gives bit-identical results whatever the world size; ``checkpoint_every``: steps, "30s" or
    "auto" (see ``recovery.policy.interval``), 0 for never; ``collective_timeout_s``,
    ``form_timeout_s``: last resorts, the supervisor is faster.
    """

    determinism: Determinism = "default"
    steps: int
    global_batch: int
    samples: int
    seed: int
    checkpoint_every: int | str
    checkpoint_keep: int
    saves: Saves = Saves()
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S
    form_timeout_s: float = FORM_TIMEOUT_S

    @model_validator(mode="after")
    def _mesh_is_a_replica(self) -> JobConfig:
        if self.mesh is not None and self.mesh.cells != self.shards:
            raise ValueError(f"a mesh of {self.mesh.described()} is not {self.shards} ranks")
        return self

    @property
    def arranged(self) -> Mesh:
        """How the ranks of a replica are arranged."""
        return self.mesh or Mesh(shard=self.shards)
