"""The scenario: typed, strict models of the YAML. Loading with positions and errors for people is in ``chaos.load``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PHASES = ("data", "forward", "backward", "collective", "optimizer", "checkpoint")
Phase = Literal["data", "forward", "backward", "collective", "optimizer", "checkpoint", "any"]
EventName = Literal["checkpoint_saving", "checkpoint_committed", "recovery_started", "regroup", "restore"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=80)]


class Strict(BaseModel):
    """Base of every scenario model: unknown keys and later changes are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointSpec(Strict):
    """Checkpoint every so many committed steps, keeping the newest few."""

    every: int = Field(default=25, ge=1, description="steps between checkpoints")
    keep: int = Field(default=3, ge=1, description="checkpoints kept; the last good one is never deleted")


class WorkloadSpec(Strict):
    """What is trained. ``kind`` names a built-in workload; ``params`` are its own parameters (``size`` for short)."""

    kind: str
    size: str | None = Field(default=None, description="shorthand for params.size")
    params: dict[str, Any] = Field(default_factory=dict)
    ranks: int = Field(default=4, ge=1)
    steps: int = Field(default=100, ge=1)
    global_batch: int = Field(default=16, ge=1, description="samples per step over all ranks")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallelism: Literal["ddp"] = "ddp"
    checkpoint: CheckpointSpec = CheckpointSpec()

    @model_validator(mode="after")
    def _batch_covers_ranks(self) -> WorkloadSpec:
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


class RecoverySpec(Strict):
    """Which strategy recovers, with its own parameters. In YAML a bare name or ``{strategy: name, param: value}``."""

    strategy: str
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"strategy": value}
        if isinstance(value, dict) and "strategy" in value and "params" not in value:
            return {
                "strategy": value["strategy"],
                "params": {k: v for k, v in value.items() if k != "strategy"},
            }
        return value


class CheckpointTarget(Strict):
    """A checkpoint of a given step."""

    step: int = Field(ge=1)


class CountTarget(Strict):
    """That many of the candidates."""

    count: int = Field(ge=1)


class TargetSpec(Strict):
    """Who is hit. ``rank`` or ``replica`` name one; else ``role`` and ``select`` choose with the seed."""

    role: Literal["worker", "spare", "any"] = "worker"
    rank: int | None = Field(default=None, ge=0)
    replica: int | None = Field(default=None, ge=0)
    checkpoint: Literal["latest"] | CheckpointTarget | None = None
    select: Literal["one", "all"] | CountTarget = "one"


class TriggerSpec(Strict):
    """When. Exactly one of ``step``, ``steps``, ``time`` (seconds after the first step starts) or ``event``.

    ``step: 77`` means: while step 77 is being computed, that is when 76 steps are committed.
    """

    step: int | None = Field(default=None, ge=1)
    steps: list[Annotated[int, Field(ge=1)]] | None = Field(default=None, min_length=1)
    time: float | None = Field(default=None, ge=0, description="seconds, or a string such as 2.5s")
    event: EventName | None = None
    nth: int = Field(default=1, ge=1, description="which occurrence of the event")
    phase: Phase | None = Field(default=None, description="default: data, the start of the step")

    @model_validator(mode="after")
    def _exactly_one(self) -> TriggerSpec:
        given = [n for n in ("step", "steps", "time", "event") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                f"needs exactly one of step, steps, time, event; has {', '.join(given) or 'none'}"
            )
        if self.phase and given[0] not in ("step", "steps"):
            raise ValueError(f"phase goes with step or steps, not with {given[0]}")
        return self


class StepsDuration(Strict):
    """A duration counted in steps of the target."""

    steps: int = Field(ge=1)


class MaxRetrigger(Strict):
    """Fire again after a rollback, so many times in all."""

    max: int = Field(ge=1)


class ExpectSpec(Strict):
    """What the fault should lead to; a different outcome fails the run."""

    outcome: Literal["masked", "recovered", "fail-stop", "sdc-escape"] | None = None
    detected_by: Literal["exit", "hang", "error", "nonfinite"] | None = None


class FaultSpec(Strict):
    """One planned fault. ``params`` are the kind's own; ``duration`` bounds faults that last."""

    id: Name
    kind: str
    params: dict[str, Any] = Field(default_factory=dict)
    target: TargetSpec = TargetSpec()
    at: TriggerSpec
    duration: float | StepsDuration | None = Field(default=None, description="seconds (or 2s), or {steps: n}")
    retrigger: Literal["once", "every_attempt"] | MaxRetrigger = "once"
    expect: ExpectSpec = ExpectSpec()


class SlaCheck(Strict):
    """One bound on a metric: ``"<aggregate> <op> <value><unit>"``; severity warn never fails a run."""

    check: str
    severity: Literal["fail", "warn"] = "fail"

    @model_validator(mode="before")
    @classmethod
    def _bare_string(cls, value: Any) -> Any:
        return {"check": value} if isinstance(value, str) else value


class StopCondition(Strict):
    """Halt and heal when this holds: ``no_committed_step_for > 60s`` or ``wall_time > 300s``."""

    when: str


class Requires(Strict):
    """Capabilities; an unmet one skips the run with exit code 7."""

    cuda_devices: int = Field(default=0, ge=0)
    cores: int = Field(default=0, ge=0)
    memory_gib: float = Field(default=0, ge=0)


class Matrix(BaseModel):
    """Axes (name -> list of values) whose product gives the cells; ``include`` and ``exclude`` adjust it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    include: list[dict[str, Any]] = Field(default_factory=list)
    exclude: list[dict[str, Any]] = Field(default_factory=list)


class LauncherSpec(Strict):
    """Where ranks run. In YAML a bare name or ``{kind: name, params: {...}}``."""

    kind: str = "local"
    params: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _bare_string(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class Scenario(Strict):
    """One resolved scenario: interpolation and matrix applied, so ``recovery`` is concrete. One cell."""

    version: Literal[1]
    name: Name
    description: str = ""
    tags: list[str] = Field(default_factory=list)
    vars: dict[str, Any] = Field(default_factory=dict)
    seed: int = Field(default=0, ge=0, lt=2**32)
    requires: Requires = Requires()
    launcher: LauncherSpec = LauncherSpec()
    workload: WorkloadSpec
    recovery: RecoverySpec
    faults: list[FaultSpec] = Field(default_factory=list)
    sla: dict[str, list[SlaCheck]] = Field(default_factory=dict)
    invariants: Literal["default"] | list[str] = "default"
    stop_conditions: list[StopCondition] = Field(default_factory=list)
    matrix: Matrix = Matrix()
    repeat: int = Field(default=1, ge=1, le=1000)
    baseline: Literal["paired", "none"] = "paired"
    order: Literal["interleaved-shuffled", "sequential"] = "interleaved-shuffled"

    @model_validator(mode="after")
    def _unique_fault_ids(self) -> Scenario:
        ids = [fault.id for fault in self.faults]
        twice = sorted({i for i in ids if ids.count(i) > 1})
        if twice:
            raise ValueError(f"fault id used twice: {', '.join(twice)}")
        return self


class Cell(Strict):
    """One matrix combination of a scenario file, concrete. ``id`` is stable: ``recovery=hot-spare`` or ``default``."""

    id: str
    params: dict[str, Any]
    scenario: Scenario


class SkippedCell(Strict):
    """A cell that could not run here, and why."""

    cell: str
    reason: str


class ResolvedRun(Strict):
    """What ``scenario.resolved.yaml`` of a run directory holds: all that ``chaos analyze`` needs beside the
    events.

    ``sla_lines``: metric -> line of each of its clauses in the source file, in order.
    """

    run_id: str
    source: str
    started: str
    reproduce: str
    seed: int
    cells: list[Cell]
    skipped: list[SkippedCell] = Field(default_factory=list)
    sla_lines: dict[str, list[int]] = Field(default_factory=dict)
