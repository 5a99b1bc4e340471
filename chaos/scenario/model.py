"""Typed, strict models of a scenario's YAML. Loading, with positions and readable errors:
``chaos.loading``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from trainchaos.chaos.scenario.fault import (
    PHASES,
    CheckpointTargetSpec,
    CountTarget,
    ExpectSpec,
    FaultSpec,
    MaxRetrigger,
    Name,
    PercentTarget,
    StepsDuration,
    Strict,
    TargetSpec,
    TraceSpec,
    TriggerSpec,
)
from trainchaos.chaos.scenario.forms import Form, SomeSeconds, readable
from trainchaos.chaos.scenario.sla import parse_stop
from trainchaos.chaos.scenario.steady import parse_steady
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.scenario.workload import CheckpointSpec, WorkloadSpec

__all__ = [
    "PHASES",
    "BlastRadius",
    "Cell",
    "CheckpointSpec",
    "CheckpointTargetSpec",
    "CountTarget",
    "ExpectSpec",
    "FaultSpec",
    "HealthSpec",
    "InvariantExclusion",
    "LauncherSpec",
    "Matrix",
    "MaxRetrigger",
    "PercentTarget",
    "RecoverySpec",
    "Requires",
    "ResolvedRun",
    "Scenario",
    "SkippedCell",
    "SlaCheck",
    "SteadyCheck",
    "StepsDuration",
    "StopCondition",
    "Strict",
    "TargetSpec",
    "Timeouts",
    "TraceSpec",
    "TriggerSpec",
    "WorkloadSpec",
]


class RecoverySpec(Strict):
    """The recovery strategy and its parameters. In YAML a bare name or ``{strategy: name, param:
    value}``.
    """

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


class Named(Strict):
    """A model that a bare text may stand for: the value of its first field."""

    @model_validator(mode="before")
    @classmethod
    def _bare_text(cls, value: Any) -> Any:
        return {next(iter(cls.model_fields)): value} if isinstance(value, str) else value


class SlaCheck(Named):
    """One bound on a metric: ``"<aggregate> <op> <value><unit>"``, a time in seconds or in steps of
    the control arm (``"median < 40 steps"``); severity warn never fails a run; fault: it holds in
    cells with a fault of this kind only.
    """

    check: str
    severity: Literal["fail", "warn"] = "fail"
    fault: str | None = None

    def covers(self, faults: Iterable[FaultSpec]) -> bool:
        """Whether it holds in a cell with these faults."""
        return self.fault is None or any(one.kind == self.fault for one in faults)


class StopCondition(Strict):
    """Halt the run and heal faults when this holds: ``no_committed_step_for > 60s``, ``wall_time >
    300s``, ``healthy_replicas < 2``, ``failures > 10`` or ``loss_nonfinite``.
    """

    when: Annotated[str, readable(parse_stop)]


class SteadyCheck(Named):
    """Required before the first fault, or the run is inconclusive: ``committed_steps >= 5 within
    60s``, ``step_time_cv < 0.5 over 10 steps`` or ``healthy_replicas >= 4``.
    """

    check: Annotated[str, readable(parse_steady)]


class BlastRadius(Strict):
    """Limits on how much may be broken at once. A plan that must exceed a limit is an error; an
    occurrence that would exceed one is not fired, and is recorded as failed.

    ``privileges``: highest privilege a fault may need on this machine; default: any.
    ``max_nodes_lost``: nodes lost or stopped as a whole at the same time, each counted until the
    job has recovered from it.
    """

    max_concurrent_faults: int | None = Field(default=None, ge=1)
    min_healthy_replicas: int | None = Field(default=None, ge=0)
    protected_ranks: list[Annotated[int, Field(ge=0)]] = Field(default_factory=list)
    protected_nodes: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list, description="nothing on them is hit"
    )
    max_nodes_lost: int | None = Field(default=None, ge=0)
    privileges: Literal["none", "net_admin", "root"] | None = None


class Requires(Strict):
    """Required capabilities; a missing one skips the run with exit code 7."""

    cuda_devices: int = Field(default=0, ge=0)
    cores: int = Field(default=0, ge=0)
    memory_gib: float = Field(default=0, ge=0)
    world_size: int = Field(
        default=0, ge=0, description="ranks that the launcher must have room for"
    )
    root: bool = False
    net_admin: bool = Field(default=False, description="may change network devices and filters")
    mount: bool = Field(default=False, description="may mount file systems")
    cgroup: bool = Field(default=False, description="a writable control group")
    docker: bool = Field(default=False, description="a Docker engine that answers")


class Matrix(BaseModel):
    """Axes (name -> list of values) whose product gives the cells; ``include`` and ``exclude``
    adjust it.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    include: list[dict[str, Any]] = Field(default_factory=list)
    exclude: list[dict[str, Any]] = Field(default_factory=list)


class LauncherSpec(Named):
    """Where ranks run. In YAML a bare name or ``{kind: name, nodes: 2, params: {...}}``.

    Ranks divide over ``nodes`` in blocks, and nodes over racks (``chaos.scenario.topology``).
    """

    kind: str = "local"
    nodes: int = Field(default=1, ge=1, le=1000)
    nodes_per_rack: int = Field(default=1, ge=1)
    params: dict[str, Any] = Field(default_factory=dict)

    def topology(self, workload: WorkloadSpec) -> Topology:
        """Placement of that workload's ranks."""
        return Topology(
            ranks=workload.ranks,
            nodes=self.nodes,
            nodes_per_rack=self.nodes_per_rack,
            shards=workload.shards,
        )


class Timeouts(Strict):
    """How long the supervisor waits: seconds, or 30s, 5m. A missing value is learned from the job,
    or has its default.
    """

    hang: SomeSeconds | None = Field(
        default=None,
        description="longest silence of a rank, whatever it does, and of all ranks together",
    )
    park: SomeSeconds | None = Field(
        default=None,
        description="minimum time for a rank to leave an aborted generation (1s)",
    )
    join: SomeSeconds | None = Field(
        default=None,
        description="longest silence while a group forms, restores and copies (60s)",
    )


class HealthSpec(Strict):
    """What the supervisor does about places that are suspect or about to fail, beside moving ranks
    off them.
    """

    preflight_rejoins: bool = Field(
        default=False,
        description="check a suspect place; used again once found fit, or if there is no other",
    )
    taint_alarms: bool = Field(
        default=False,
        description="add places that are failing, or found unfit, to the list of tainted ones",
    )


RETIRED_INVARIANTS = ("happens-before", "lifecycle", "time-closure")
"""Names that stored scenarios may list, and that nothing is judged by any more: they held lines of
one log against each other, which a seal makes needless (docs/verdicts.md).
"""


class InvariantExclusion(Strict):
    """All invariants except these, which then do not affect the verdict."""

    leave_out: list[str] = Field(min_length=1)


def _checkers(value: Any) -> Any:
    """Each name, and the keys of a mapping, are complained of by themselves."""
    if isinstance(value, dict):
        return InvariantExclusion.model_validate(value, strict=True)
    return _NAMES.validate_python(value, strict=True) if isinstance(value, list) else value


_NAMES = TypeAdapter(list[str])


class Scenario(Strict):
    """One resolved scenario (one cell), with interpolation and matrix applied."""

    version: Literal[1]
    name: Name
    description: str = ""
    tags: list[str] = Field(default_factory=list)
    extends: str | None = Field(
        default=None, description="another scenario file, which this one modifies"
    )
    vars: dict[str, Any] = Field(default_factory=dict)
    seed: int = Field(default=0, ge=0, lt=2**32)
    requires: Requires = Requires()
    launcher: LauncherSpec = LauncherSpec()
    workload: WorkloadSpec
    recovery: RecoverySpec
    timeouts: Timeouts = Timeouts()
    health: HealthSpec = HealthSpec()
    faults: list[FaultSpec] = Field(default_factory=list)
    sla: dict[str, list[SlaCheck]] = Field(default_factory=dict)
    invariants: Annotated[
        Literal["default", "observable"] | list[str] | InvariantExclusion,
        Form(
            "default, observable, a list of checker names, or {leave_out: [names]}",
            _checkers,
        ),
    ] = "default"
    stop_conditions: list[StopCondition] = Field(default_factory=list)
    steady_state: list[SteadyCheck] = Field(default_factory=list)
    blast_radius: BlastRadius = BlastRadius()
    matrix: Matrix = Matrix()
    repeat: int = Field(default=1, ge=1, le=1000)
    baseline: Literal["paired", "none"] = "paired"
    order: Literal["interleaved-shuffled", "sequential"] = "interleaved-shuffled"

    @property
    def topology(self) -> Topology:
        """Placement of the ranks."""
        return self.launcher.topology(self.workload)

    @model_validator(mode="after")
    def _fits_together(self) -> Scenario:
        if self.workload.command is not None and self.timeouts != Timeouts():
            raise ValueError(
                "timeouts: a command is supervised by itself; leave them out, or use"
                " workload.progress_deadline"
            )
        if self.workload.command is not None and self.health != HealthSpec():
            raise ValueError("health: a command chooses its places itself; leave it out")
        for fault in () if self.health.preflight_rejoins else self.faults:
            if fault.expect.preflight or fault.at.event == "place_checked":
                checked = bool(fault.expect.preflight)
                raise ValueError(
                    f"{'expect.preflight' if checked else 'at.event place_checked'} of {fault.id}:"
                    " no place is checked here; set health: {preflight_rejoins: true}"
                )
        return self


class Cell(Strict):
    """One matrix combination of a scenario file, concrete. ``id`` is stable: ``recovery=hot-spare``
    or ``default``.

    ``exact_for``: id of the cell that this one repeats once with elastic sums
    (``chaos.loading.load``).
    """

    id: str
    params: dict[str, Any]
    scenario: Scenario
    exact_for: str | None = None

    def among(self, only: Collection[str]) -> bool:
        """Whether ``only`` selects this cell. An empty ``only`` selects all; naming a cell also
        selects its repeat with elastic sums.
        """
        return not only or self.id in only or self.exact_for in only


class SkippedCell(Strict):
    """A cell that could not run here, and why."""

    cell: str
    reason: str


class ResolvedRun(Strict):
    """Content of ``scenario.resolved.yaml`` in a run directory: all that ``chaos analyze`` needs
    besides the events.

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
    lines: dict[str, int] = Field(
        default_factory=dict, description="dotted key -> its line in the source file"
    )
