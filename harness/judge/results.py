"""The shape of ``results.json``: everything in it is derived from event logs by
``harness.judge.verdict.judge``.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from chaos.events.figures import counted

SCHEMA_VERSION = 1
Verdict = Literal["pass", "fail", "inconclusive"]
PHASE_NAMES = ("detect", "abort", "regroup", "restore", "redo", "first step")


def merge(verdicts: list[Verdict]) -> Verdict:
    """fail > inconclusive > pass; nothing at all is inconclusive (a run that tested nothing never
    passes).
    """
    if "fail" in verdicts:
        return "fail"
    if "inconclusive" in verdicts or not verdicts:
        return "inconclusive"
    return "pass"


class Model(BaseModel):
    """Base of what ``results.json`` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _to_json(value: float | None) -> float | str | None:
    return "Infinity" if value is not None and math.isinf(value) else value


def _from_json(value: Any) -> Any:
    return math.inf if value == "Infinity" else value


class Metric(Model):
    """One metric over the repeats of a cell. Non-recovery counts as infinity (``"Infinity"`` in
    JSON), never missing.
    """

    unit: str
    values: list[float]
    n: int
    median: float | None
    min: float | None
    max: float | None
    ci95: tuple[float, float] | None = Field(
        description="distribution-free interval of the median arm; None for fewer than 6 arms"
    )
    better: Literal["lower", "higher", "neither"] = "lower"
    clock_bound: float = Field(
        default=0.0,
        description=(
            "how far a value may be from the truth, as clocks of several machines are in it"
        ),
    )
    arms: list[int] = Field(
        default=[], description="repeat that each value is of; empty in older results"
    )
    p95: float | None = Field(default=None, description="of arms; None for fewer than 59 of them")
    p99: float | None = Field(default=None, description="of arms; None for fewer than 299 of them")
    of: int | None = Field(
        default=None,
        description=(
            "incidents or arms that could have given a value, n of which did; None: not counted, as"
            " of checkpoints and in older results"
        ),
    )
    of_arms: int | None = Field(
        default=None, description="arms that were planned; None in older results"
    )

    @property
    def counted(self) -> str:
        """How many values there are: ``3``, or ``2 of 3`` where an incident or an arm gave none."""
        return counted(self.n, self.of)

    @field_validator("values", "ci95", mode="before")
    @classmethod
    def _read_all(cls, value: Any) -> Any:
        return value if value is None else [_from_json(v) for v in value]

    @field_validator("median", "min", "max", "p95", "p99", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return _from_json(value)

    @field_serializer("values", "ci95")
    def _write_all(self, value: Any) -> Any:
        return value if value is None else [_to_json(v) for v in value]

    @field_serializer("median", "min", "max", "p95", "p99")
    def _write(self, value: float | None) -> float | str | None:
        return _to_json(value)


class PhaseSpan(Model):
    """One recovery phase: seconds, and start relative to the injection in seconds."""

    name: str
    start: float
    seconds: float


class Hit(Model):
    """One victim of an act that had several. Times in seconds since the act began; see
    ``Incident``.
    """

    occurrence: int
    target: dict[str, Any]
    landed: bool
    healed: bool
    outcome: str
    detected_by: str | None
    detection_time: float | None
    recovery_time: float | None
    steps_lost: int

    @field_validator("detection_time", "recovery_time", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return _from_json(value)

    @field_serializer("detection_time", "recovery_time")
    def _write(self, value: float | None) -> float | str | None:
        return _to_json(value)


class Incident(Model):
    """One act of a fault in one arm, on one victim or on several at once, and what the system made
    of it (``harness.judge.measure.acts``: what of several victims is told).
    """

    fault: str
    kind: str
    cell: str
    repeat: int
    occurrence: int = Field(
        description="of its first victim, from 0; negative: planned, never fired"
    )
    target: dict[str, Any]
    step: int | None
    injected_s: float = Field(description="seconds since the arm's run_started")
    landed: bool
    witness: str | None
    evidence: dict[str, Any]
    healed: bool
    detected_by: str | None
    blamed_rank: int | None
    detection_time: float | None = Field(
        description="seconds; Infinity: it did harm and was never noticed"
    )
    recovery_time: float | None = Field(
        description="seconds; Infinity: no recovery; None: nothing to recover from"
    )
    outcome: Literal[
        "masked", "recovered", "fail-stop", "sdc-escape", "hang", "degraded", "not-landed"
    ]
    phases: list[PhaseSpan]
    steps_lost: int = Field(
        description="redone; 0 also where nobody came to do them again, see never_recovered"
    )
    restored_step: int | None
    first_new_step: int | None
    decision: str
    nodes: list[int] = Field(
        default=[], description="that it acted on, or on whose processes it did"
    )
    clock_bound_s: float = Field(
        default=0.0,
        description="how far recovery_time may be from the truth, for the clocks of the nodes",
    )
    hits: list[Hit] = Field(default=[], description="every victim, where the act had several")
    time_to_full_rate: float | None = Field(
        default=None, description="seconds; None: too few steps to tell"
    )
    time_to_redundancy: float | None = Field(
        default=None,
        description="seconds; None: nothing was lost, or the arm ended before it could be told",
    )
    answered_with: str | None = Field(
        default=None,
        description="fault whose rollback answered this one too: the steps lost are counted there",
    )

    @property
    def occurrences(self) -> tuple[int, ...]:
        """Numbers of all its hits."""
        return tuple(hit.occurrence for hit in self.hits) or (self.occurrence,)

    @property
    def fired(self) -> bool:
        """Whether it was injected at all."""
        return self.occurrence >= 0

    @property
    def never_recovered(self) -> bool:
        """Whether the job ended by it, with all that it had done."""
        return self.recovery_time == math.inf

    @field_validator(
        "detection_time", "recovery_time", "time_to_full_rate", "time_to_redundancy", mode="before"
    )
    @classmethod
    def _read(cls, value: Any) -> Any:
        return _from_json(value)

    @field_serializer("detection_time", "recovery_time", "time_to_full_rate", "time_to_redundancy")
    def _write(self, value: float | None) -> float | str | None:
        return _to_json(value)


class Finding(Model):
    """A checker's answer. ``witness``: the events or values that show it; for inconclusive, what is
    missing.
    """

    verdict: Verdict
    witness: str


class SlaResult(Model):
    """One SLA clause judged over the repeats of a cell."""

    cell: str
    metric: str
    clause: str
    severity: Literal["fail", "warn"]
    verdict: Verdict
    observed: float | None
    unit: str
    values: list[float]
    detail: str
    line: int | None = Field(default=None, description="line of the clause in the scenario file")
    arms: list[int] = Field(
        default=[], description="repeat that each value is of; empty in older results"
    )
    of: int | None = Field(
        default=None, description="how many values there could have been, see Metric.of"
    )
    of_arms: int | None = Field(
        default=None, description="arms that were planned; None in older results"
    )

    @property
    def counted(self) -> str:
        """How many values the clause was judged by: ``3``, or ``2 of 3``."""
        return counted(len(self.values), self.of)

    @field_validator("values", mode="before")
    @classmethod
    def _read_all(cls, value: Any) -> Any:
        return [_from_json(v) for v in value]

    @field_validator("observed", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        return _from_json(value)

    @field_serializer("values")
    def _write_all(self, value: list[float]) -> list[Any]:
        return [_to_json(v) for v in value]

    @field_serializer("observed")
    def _write(self, value: float | None) -> float | str | None:
        return _to_json(value)


class NodeResult(Model):
    """A node of an arm. ``processes``: that were started on it, in order; ``lost``: when and why,
    each time.
    """

    node: int
    host: str
    address: str = Field(description="where its ranks listen; empty where nodes are names only")
    devices: list[str]
    processes: list[str]
    lost: list[str]
    clock_bound_s: float = Field(
        description="how far the times of its ranks may be from the truth; 0: one clock"
    )


class ArmResult(Model):
    """One run of training: faulted or control. ``events``: its log directory relative to the run
    directory.
    """

    id: str
    cell: str
    repeat: int
    arm: Literal["faulted", "control"]
    seed: int
    events: str
    outcome: str
    reason: str
    wall_s: float
    committed_step: int
    steps: int
    goodput: float | None
    badput: dict[str, float] = Field(
        description="class -> seconds of wall time; with useful time they sum to wall_s"
    )
    useful_s: float
    residual_s: float = Field(
        description="wall_s minus useful and badput: what the classes do not explain"
    )
    step_time_median: float | None
    provisioned_ranks: int
    invariants: dict[str, Finding]
    nodes: list[NodeResult] = []


class Survival(Model):
    """See ``harness.judge.measure.reliability.survival``. ``low``, ``high``: exact 95 % interval of
    the probability.
    """

    arms: int
    survived: int
    probability: float | None
    low: float
    high: float


LEAST_RANK_HOURS = 3.0
"""Of fewer no rate of false alarms is stated: none seen in so many is a rate below one a rank-hour,
with 95 %.
"""


class FalseAlarms(Model):
    """See ``harness.judge.measure.reliability.false_alarms``. Per rank-hour; ``upper``: what the
    true rate is below, with 95 % confidence.
    """

    count: int
    rank_hours: float
    rate: float | None
    upper: float | None

    @property
    def enough(self) -> bool:
        """Whether the hours are enough to state a rate."""
        return self.rank_hours >= LEAST_RANK_HOURS


class Spares(Model):
    """See ``harness.judge.measure.reliability.spares_of``. ``share``: of the provisioned rank time;
    ``memory_mib``, ``cores``: of one that never trained, median of the ``measured`` ones.
    """

    provisioned: int
    idle_rank_hours: float
    share: float
    measured: int
    memory_mib: float | None
    cores: float | None


class Reliability(Model):
    """Rates over the arms of a cell."""

    survival: Survival
    false_alarms: FalseAlarms
    spares: Spares


class CellResult(Model):
    """All repeats of one matrix cell. ``absent``: metric -> why it has no value."""

    id: str
    label: str = Field(
        default="", description="what reports call it, no two alike; empty in older results"
    )
    params: dict[str, Any]
    exact_for: str | None = Field(
        default=None, description="cell that this one repeats once with elastic sums"
    )
    strategy: str
    verdict: Verdict
    reason: str
    metrics: dict[str, Metric]
    invariants: dict[str, Finding] = Field(
        description="merged over arms; the witness names the arm"
    )
    reliability: Reliability | None = None
    absent: dict[str, str] = Field(default={})
    exactness: str = Field(
        description="'bit for bit', 'within the control band', 'differs', 'not compared'"
    )


class Skip(Model):
    """A cell that did not run, and why."""

    cell: str
    reason: str


class Results(Model):
    """Everything ``chaos analyze`` derives from a run directory."""

    schema_version: int = SCHEMA_VERSION
    scenario: str
    description: str
    run_id: str
    seed: int
    started: str
    source: str = Field(description="path of the scenario file as given")
    system: dict[str, Any]
    workload: dict[str, Any]
    verdict: Verdict | Literal["skipped", "interrupted", "halted", "broken", "unsafe"]
    exit_code: int
    reason: str
    cells: list[CellResult]
    arms: list[ArmResult]
    faults: list[Incident]
    slas: list[SlaResult]
    skipped: list[Skip]
    fidelity: list[str] = Field(description="what was emulated rather than real")
    reproduce: str

    @property
    def timed(self) -> list[CellResult]:
        """The cells whose figures are compared: those with elastic sums are there for their
        exactness.
        """
        return [cell for cell in self.cells if cell.exact_for is None]
