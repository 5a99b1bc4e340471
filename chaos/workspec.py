"""What a scenario says about the training it watches: a built-in workload, or any command. See ``chaos.scenario``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from chaos.faultspec import Strict

COMMAND = "command"
"""The kind of a workload that is a command."""
ONLY_BUILT_IN = ("size", "params", "device", "parallelism")
ONLY_COMMAND = ("directory", "env", "progress", "progress_deadline", "restarts")


class CheckpointSpec(Strict):
    """Checkpoint every so many committed steps, keeping the newest few. A command only says where it puts its own."""

    every: int = Field(default=25, ge=1, description="steps between checkpoints")
    keep: int = Field(default=3, ge=1, description="checkpoints kept; the last good one is never deleted")
    directory: str | None = Field(default=None, description="of a command: where it keeps its checkpoints")


class RegexProgress(Strict):
    """Progress read from a command's output: a regular expression with a group ``step`` (``loss``, ``samples``
    and ``rank`` are optional groups), searched in each line.
    """

    regex: str = Field(min_length=1, max_length=1000)


class WorkloadSpec(Strict):
    """What is trained: ``kind`` names a built-in workload and ``params`` its own parameters (``size`` for short);
    or ``command`` is any training program, run as it is, that recovers by itself.
    """

    kind: str = Field(default="", description="a built-in workload; left out with command")
    size: str | None = Field(default=None, description="shorthand for params.size")
    params: dict[str, Any] = Field(default_factory=dict)
    ranks: int = Field(default=4, ge=1)
    steps: int = Field(default=100, ge=1)
    global_batch: int = Field(
        default=16,
        ge=1,
        description="samples per step over all ranks; of a command 1, so that steps are counted",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallelism: Literal["ddp"] = "ddp"
    checkpoint: CheckpointSpec = CheckpointSpec()
    command: list[str] | None = Field(
        default=None, min_length=1, description="any training program, as a list"
    )
    directory: str = Field(default=".", description="where the command runs, relative to the scenario file")
    env: dict[str, str] = Field(default_factory=dict, description="added to the command's environment")
    progress: Literal["beacon"] | RegexProgress = "beacon"
    progress_deadline: float = Field(
        default=60.0, gt=0, description="longest time without progress, start-up included: seconds, or 60s"
    )
    restarts: int = Field(
        default=0, ge=0, le=1000, description="times the command is started again when it ends abnormally"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_command(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("command") is not None:
            return {"kind": COMMAND, "global_batch": 1, **value}
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> WorkloadSpec:
        if self.command is None and self.kind in ("", COMMAND):
            raise ValueError("'kind' is missing: name a built-in workload, or give a command: [program, ...]")
        return self

    @model_validator(mode="after")
    def _batch_covers_ranks(self) -> WorkloadSpec:
        if self.command is not None:
            return self
        if self.global_batch < self.ranks:
            raise ValueError(
                f"global_batch {self.global_batch} cannot feed {self.ranks} ranks: "
                f"use global_batch >= {self.ranks} or ranks <= {self.global_batch}"
            )
        if self.global_batch % self.ranks:
            below = self.global_batch // self.ranks * self.ranks
            raise ValueError(
                f"global_batch {self.global_batch} does not divide over {self.ranks} ranks: "
                f"use {below} or {below + self.ranks}"
            )
        return self

    @property
    def title(self) -> str:
        """For people: the built-in's name and size, or the program that is run."""
        if self.command is None:
            return " ".join(word for word in (self.kind, str(self.params.get("size", ""))) if word)
        names = [word.rsplit("/", 1)[-1] for word in self.command]
        scripts = [name for name in names if name.endswith((".py", ".sh"))]
        return scripts[0] if scripts else names[0]
