"""Scenario model of the training job: a built-in workload, or any command. See
``chaos.scenario.model``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from trainchaos.chaos.scenario.fault import Strict
from trainchaos.chaos.scenario.forms import SomeSeconds
from trainchaos.chaos.scenario.parallelism import Hybrid, MeshShape, Parallelism
from trainchaos.chaos.scenario.progress import Progress
from trainchaos.chaos.scenario.sla import parse_duration

COMMAND = "command"
"""Kind of a workload that runs a command."""
ONLY_BUILT_IN = (
    "size",
    "params",
    "device",
    "backend",
    "parallelism",
    "determinism",
    "verify_every",
    "evaluate",
)
ONLY_COMMAND = (
    "directory",
    "env",
    "progress",
    "progress_deadline",
    "start_deadline",
    "restarts",
    "children",
    "points",
    "group",
)


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B\s*")
_PREFIXES = "kMGT"


def size_bytes(text: str) -> int:
    """Bytes of a size such as ``2GB`` or ``512MiB``. Raises ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not a size: write a number and B, kB, MB, GB or TB (or MiB, GiB ...)"
        )
    number, prefix, binary = found.groups()
    power = _PREFIXES.index(prefix) + 1 if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _interval(value: int | str) -> int | str:
    """An interval between checkpoints as it was given. Raises ValueError."""
    if isinstance(value, int):
        if value < 1:
            raise ValueError(
                f"{value} is not a step count: use 1 or more, or a time such as 30s, or auto"
            )
    elif value != "auto" and parse_duration(value) <= 0:
        raise ValueError(
            "checkpoints need some time between them: use 30s, 5m, a number of steps, or auto"
        )
    return value


Interval = Annotated[int | str, AfterValidator(_interval)]
"""Between two checkpoints: steps, a time such as 30s, or auto."""


class MemorySpec(Strict):
    """Checkpoints in memory: a process on each node keeps what its ranks save, and a copy for
    another node.
    """

    every: Interval = Field(
        default=5,
        description="steps between checkpoints in memory, or a time such as 30s, or auto",
    )
    limit: str = Field(
        default="4GB",
        description="memory for these checkpoints per node, including copies for other nodes",
    )
    replicate: bool = Field(
        default=True, description="keep a copy on another node, where there is one"
    )

    @field_validator("limit")
    @classmethod
    def _is_a_size(cls, value: str) -> str:
        if size_bytes(value) < 1:
            raise ValueError(
                "the limit is zero: use 100MB or more, at least three times the state of a"
                " node's ranks"
            )
        return value

    @property
    def steps(self) -> int | None:
        """Steps between checkpoints; None if the interval is not in steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def limit_bytes(self) -> int:
        """``limit`` in bytes."""
        return size_bytes(self.limit)


class CheckpointSpec(Strict):
    """Save a checkpoint every ``every`` committed steps, and keep the newest ones. A command only
    gives the directory of its own checkpoints.
    """

    every: Interval = Field(
        default=25,
        description="steps between checkpoints, or a time such as 30s, or auto: cheapest interval",
    )
    keep: int = Field(
        default=3, ge=1, description="checkpoints kept; the last good one is never deleted"
    )
    mode: Literal["sync", "async"] = Field(
        default="sync",
        description="async: training waits only for a copy in memory, written in the background",
    )
    sharded: bool = Field(
        default=False,
        description="ranks that hold the same share the writing (sharded models always do)",
    )
    delta: int | None = Field(
        default=None,
        ge=2,
        description="write only what changed, and everything at every n-th checkpoint",
    )
    mtbf: SomeSeconds | None = Field(
        default=None,
        description="with every: auto: mean time between failures, seconds or 3h; else observed",
    )
    directory: str | None = Field(
        default=None, description="of a command: where it keeps its checkpoints"
    )
    memory: MemorySpec | bool = Field(
        default=False,
        description=(
            "checkpoints in memory besides: true, or {every: 5, limit: 4GB, replicate: true}"
        ),
    )

    @model_validator(mode="after")
    def _mtbf_for_auto(self) -> CheckpointSpec:
        if self.mtbf is not None and self.every != "auto":
            raise ValueError(
                f"mtbf says how often to save, and so does every: {self.every}; use every: auto"
                " with it"
            )
        return self

    @property
    def steps(self) -> int | None:
        """Steps between checkpoints; None if the interval is not in steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def in_memory(self) -> MemorySpec | None:
        """``memory``, spelled out; None: none."""
        return MemorySpec() if self.memory is True else self.memory or None


class EvaluateSpec(Strict):
    """Rank 0 evaluates the model between two steps, while the others wait for it."""

    every: int = Field(ge=1, description="steps between evaluations")
    takes: SomeSeconds = Field(le=3600, description="how long each takes: seconds, or 30s")
    declared: bool = Field(
        default=True,
        description="rank 0 reports it (job.busy); false: it only stops training meanwhile",
    )

    @property
    def due(self) -> dict[str, float]:
        """Interval in steps, and duration in seconds."""
        return {"every": self.every, "takes": self.takes}


class WorkloadSpec(Strict):
    """The training job: ``kind`` names a built-in workload and ``params`` its parameters (``size``
    is a shorthand); or ``command`` is any training program, run unchanged, that recovers by itself.
    """

    kind: str = Field(default="", description="a built-in workload; left out with command")
    size: str | None = Field(default=None, description="shorthand for params.size")
    params: dict[str, Any] = Field(default_factory=dict)
    ranks: int = Field(default=4, ge=1)
    steps: int = Field(default=100, ge=1)
    global_batch: int = Field(
        default=16,
        ge=1,
        description="samples per step over all ranks; for a command 1, so that steps are counted",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto",
        description=(
            "how ranks exchange tensors; auto: nccl where every process has a GPU of its own, else"
            " gloo; nccl on fewer GPUs: ranks share them, slowly"
        ),
    )
    parallelism: Parallelism = Field(
        default="ddp",
        description=(
            "every rank holds the model (ddp), all hold one copy together (fsdp),"
            " {hsdp: {replicas: R, shards: S}}, or a mesh: {replicate: R, shard: S, pipeline: P,"
            " context: C, tensor: T}"
        ),
    )
    determinism: Literal["default", "elastic"] = Field(
        default="default",
        description=(
            "elastic: the same result, bit for bit, however many ranks take part in a step; left"
            " out, a strategy that goes on with fewer ranks has one repeat with elastic sums beside"
            " its own"
        ),
    )
    verify_every: int | None = Field(
        default=None,
        ge=0,
        description=(
            "steps after which replicas compare digests of their state, 0 for never; else with each"
            " checkpoint"
        ),
    )
    evaluate: EvaluateSpec | None = Field(
        default=None, description="rank 0 evaluates between steps: {every: 20, takes: 8s}"
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    command: list[str] | None = Field(
        default=None, min_length=1, description="any training program, as a list"
    )
    directory: str = Field(
        default=".", description="where the command runs, relative to the scenario file"
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="added to the command's environment"
    )
    progress: Progress = "beacon"
    progress_deadline: SomeSeconds = Field(
        default=60.0,
        description="longest time without progress, start-up included: seconds, or 60s",
    )
    start_deadline: SomeSeconds | None = Field(
        default=None,
        description="longest time to the first progress; default: progress_deadline",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="times the command is started again when it ends abnormally",
    )
    children: Literal["take", "leave"] = Field(
        default="take",
        description="of a rank of a command that is killed: killed with it, or left alive, as"
        " SIGKILL alone leaves them",
    )
    points: bool = Field(
        default=False,
        description="of a command: its script calls beacon.point, where faults can act",
    )

    group: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        max_length=100,
        description=(
            "of a command: the environment variable that says which replica group a process is in,"
            " where each counts its ranks from 0 (torchft: REPLICA_GROUP_ID)"
        ),
    )

    def patience(self, *, begun: bool) -> tuple[float, str]:
        """Seconds that a command may go without progress, and the name of this limit; ``begun``:
        there was some progress already.
        """
        if begun or self.start_deadline is None:
            return self.progress_deadline, "progress_deadline"
        return self.start_deadline, "start_deadline"

    @model_validator(mode="before")
    @classmethod
    def _of_a_command(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("command") is not None:
            return {"kind": COMMAND, "global_batch": 1, **value}
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> WorkloadSpec:
        if problem := self._command_misfit() or self._shape_misfit() or self._batch_misfit():
            raise ValueError(problem)
        if self.evaluate is not None and self.shards > 1:
            raise ValueError(
                "evaluate: rank 0 evaluates alone, and of a sharded model it holds a part; use"
                " parallelism: ddp"
            )
        if self.determinism == "elastic" and self.shards > 1:
            raise ValueError(
                "determinism: elastic is for ranks that each hold the whole model: a sharded one"
                " sums its gradients while they are computed; use parallelism: ddp, or determinism:"
                " default (hot-spare and checkpoint-restart are bit-identical then, too)"
            )
        return self

    def _command_misfit(self) -> str | None:
        if self.command is None and self.kind in ("", COMMAND):
            return "'kind' is missing: name a built-in workload, or give a command: [program, ...]"
        if self.command is not None and self.checkpoint.in_memory is not None:
            return (
                "checkpoint.memory: a command looks after its checkpoints itself; leave it out, or"
                " call recovery.join() in the program and make it a workload of kind script"
            )
        return None

    def _shape_misfit(self) -> str | None:
        if self.backend == "nccl" and self.device == "cpu":
            return "backend: nccl exchanges what is on GPUs; use device: cuda, or gloo"
        if isinstance(self.parallelism, Hybrid | MeshShape):
            return self.parallelism.misfit(self.ranks)
        return None

    def _batch_misfit(self) -> str | None:
        """Why the batch does not divide over the ranks."""
        if self.command is not None:
            return None
        shares = self.ranks // self.alike
        what = f"{self.ranks} ranks" if self.alike == 1 else f"{shares} shares of ranks"
        if self.global_batch < shares:
            return (
                f"global_batch {self.global_batch} cannot feed {what}: "
                f"use global_batch >= {shares} or ranks <= {self.global_batch * self.alike}"
            )
        if self.global_batch % max(1, shares):
            below = self.global_batch // shares * shares
            return (
                f"global_batch {self.global_batch} does not divide over {what}: "
                f"use {below} or {below + shares}"
            )
        return None

    @property
    def savers(self) -> int:
        """How many ranks, from 0 on, write a part of each checkpoint; 1: rank 0 alone saves."""
        return self.ranks if self.shards == 1 and self.checkpoint.sharded else self.shards

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model together."""
        if isinstance(self.parallelism, Hybrid | MeshShape):
            return self.parallelism.cells
        return self.ranks if self.parallelism == "fsdp" else 1

    @property
    def mesh(self) -> MeshShape | None:
        """The mesh, if the scenario has one."""
        return self.parallelism if isinstance(self.parallelism, MeshShape) else None

    @property
    def alike(self) -> int:
        """Ranks that compute the same samples together: neighbours."""
        return self.mesh.alike if self.mesh is not None else 1

    @property
    def title(self) -> str:
        """For people: the built-in's name and size, or the program that is run."""
        if self.command is None:
            return " ".join(word for word in (self.kind, str(self.params.get("size", ""))) if word)
        names = [word.rsplit("/", 1)[-1] for word in self.command]
        scripts = [name for name in names if name.endswith((".py", ".sh"))]
        return scripts[0] if scripts else names[0]
