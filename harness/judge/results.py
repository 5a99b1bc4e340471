"""The shape of ``results.json``: everything in it is derived from event logs by
``harness.judge.verdict.judge``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from trainchaos.chaos.units import counted, enclosing, number, with_unit
from trainchaos.harness.host.seal import Sealed
from trainchaos.harness.judge.figures import Metric, Model, Number
from trainchaos.harness.judge.incident import Incident

SCHEMA_VERSION = 1
Verdict = Literal["pass", "fail", "inconclusive"]


def merge(verdicts: list[Verdict]) -> Verdict:
    """fail > inconclusive > pass; an empty list is inconclusive (a run that tested nothing never
    passes).
    """
    if "fail" in verdicts:
        return "fail"
    if "inconclusive" in verdicts or not verdicts:
        return "inconclusive"
    return "pass"


def in_steps(
    values: Sequence[float], arms: Sequence[int], steps: Mapping[int, float]
) -> tuple[list[float], list[int], list[float | None], list[int]]:
    """Times as multiples of a step of the control arm, for SLAs that mean the same on any machine,
    with the repeat of each (``arms``), the seconds of its step, and repeats with a time that there
    is no step for. ``steps``: repeat -> seconds of a step of its control arm, of those that have
    one. What never ended is infinite in any unit.

    A step is T of the arm's own paired control arm (``harness.judge.measure.partition.ideal_of``).
    Each value is divided by the step of its own repeat before anything is aggregated: on a machine
    whose speed changes between repeats, the step of another repeat, or the cell's median, would say
    that a recovery got slower where only the machine did.
    """
    rows = [(value, arm, steps.get(arm)) for value, arm in zip(values, arms, strict=True)]
    counted_ones = [row for row in rows if row[2] is not None or not math.isfinite(row[0])]
    return (
        [value / step_s if step_s is not None else value for value, _, step_s in counted_ones],
        [arm for _, arm, _ in counted_ones],
        [step_s for *_, step_s in counted_ones],
        [arm for value, arm, step_s in rows if step_s is None and math.isfinite(value)],
    )


def error_in_steps(seconds: float, step_s: Sequence[float | None]) -> float:
    """The largest error of values in steps whose seconds may be wrong by so much. The step's own is
    none: both ends of it are read from the clocks of the same ranks.
    """
    return seconds / min((one for one in step_s if one is not None), default=math.inf)


def beside(observed_s: float | None, step_s: Sequence[float | None], better: str) -> str:
    """What is said beside a number of steps: `` (0.331 s, a step of 0.0295 s)``; "" without
    steps.
    """
    known = sorted(one for one in step_s if one is not None)
    if not known:
        return ""
    between = f"a step of {with_unit(known[0], 's')}"
    if number(known[0]) != number(known[-1]):
        between = "steps of {} to {} s".format(*enclosing(known[0], known[-1]))
    ended = observed_s is not None and math.isfinite(observed_s)
    return f" ({with_unit(observed_s, 's', better)}, {between})" if ended else f" ({between})"


class Finding(Model):
    """A checker's answer. ``witness``: the events or values that show it; if inconclusive, what is
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
    observed: Number | None
    unit: str
    values: list[Number]
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
    step_s: list[float | None] = Field(
        default=[],
        description=(
            "of a time bounded in steps, whose values and unit are then steps: seconds of a step of"
            " the control arm, one for each value; None where it has none, and the value is"
            " Infinity"
        ),
    )
    observed_s: Number | None = Field(
        default=None, description="of a time bounded in steps: the same aggregate in seconds"
    )

    @property
    def counted(self) -> str:
        """How many values the clause was judged by: ``3``, or ``2 of 3``."""
        return counted(len(self.values), self.of)

    @property
    def timed(self) -> bool:
        """Whether it bounds a time, in seconds or in steps."""
        return self.unit == "s" or bool(self.step_s)

    def shown(self, better: str = "neither") -> str:
        """What was observed, with its unit; in steps: ``11.2 steps (0.331 s, a step of 0.0295
        s)``.
        """
        return with_unit(self.observed, self.unit, better) + beside(
            self.observed_s, self.step_s, better
        )

    def error(self, seconds: float) -> float:
        """An error of the metric's values, in the unit of these."""
        return error_in_steps(seconds, self.step_s) if self.step_s else seconds


class NodeResult(Model):
    """A node of an arm. ``processes``: started there, in order; ``lost``: times and reasons."""

    node: int
    host: str
    address: str = Field(description="where its ranks listen; empty where nodes are names only")
    devices: list[str]
    processes: list[str]
    lost: list[str]
    clock_bound_s: float = Field(description="largest error of its ranks' times; 0: one clock")


class Arrivals(Model):
    """See ``harness.judge.checkers.faults.due.arrivals_of``."""

    fired: int
    due: int


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
    residual_s: float = Field(description="wall_s minus useful and badput: time in no class")
    step_time_median: float | None
    provisioned_ranks: int
    invariants: dict[str, Finding]
    nodes: list[NodeResult] = Field(default_factory=list)
    arrivals: dict[str, Arrivals] = Field(
        default={}, description="of each fault that comes at times that are drawn or traced"
    )
    others: float | None = Field(
        default=None,
        description="processors of its machine that other programs used, on average, if much",
    )


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
"""With fewer rank-hours no rate of false alarms is stated: none seen in this many bounds the rate
below one per rank-hour, with 95 % confidence.
"""


class FalseAlarms(Model):
    """See ``harness.judge.measure.reliability.false_alarms``. Per rank-hour; ``upper``: upper bound
    of the true rate, with 95 % confidence.
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
    ``memory_mib``, ``cores``: of a spare that never trained, median of the ``measured`` ones.
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
    """All repeats of one matrix cell. ``absent``: metric -> why it has no value; ``unjudged``:
    invariant that a command cannot be judged by -> the evidence that it does not give.
    """

    id: str
    label: str = Field(default="", description="unique name in reports; empty in older results")
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
    unjudged: dict[str, str] = Field(default={})
    exactness: str = Field(
        description="'bit for bit', 'within the control band', 'differs', 'not compared'"
    )


class Skip(Model):
    """A cell that did not run, and why."""

    cell: str
    reason: str


def titled(verdict: str, *, simulated: bool, unsealed: bool = False) -> str:
    """A verdict as every output shows it: ``PASS``, ``FAIL, simulated``, ``PASS, unsealed``."""
    return verdict.upper() + ", simulated" * simulated + ", unsealed" * unsealed


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
    simulated: bool = Field(
        default=False, description="nothing is real: ranks, times and results are simulated"
    )
    seal: Sealed = Field(
        default=Sealed(state="none"), description="whether the files are as the run wrote them"
    )
    unsealed: bool = Field(
        default=False, description="judged although the seal is broken, as --unsealed says"
    )

    @property
    def refused(self) -> bool:
        """Whether the verdict is open because the seal is broken."""
        return self.seal.state == "broken" and not self.unsealed

    @property
    def title(self) -> str:
        """The verdict as every output shows it."""
        return titled(self.verdict, simulated=self.simulated, unsealed=self.unsealed)

    @property
    def timed(self) -> list[CellResult]:
        """The cells whose figures are compared. Cells with elastic sums only check exactness."""
        return [cell for cell in self.cells if cell.exact_for is None]
