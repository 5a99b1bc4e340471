"""What ``chaos project`` stores: what was asked, and what came out."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.chaos.stats import student_quantile

SCHEMA_VERSION = 2
GPUS_PER_NODE = 8
APART = 4.0
"""Standard errors from which on the two engines differ: chance alone exceeds it once in 16,000."""
MATTERS = 1e-3
"""Goodput; a smaller difference between the engines changes no decision."""
TIE = 1e-6
"""Goodput; two strategies that are no further apart by the formulas are alike."""
ERRORS = 3.0
"""Standard errors of a difference up to which two simulations may differ by chance."""
NO_ERROR = 1e-12
"""Goodput; a standard error up to it is rounding."""


def t95(degrees: int) -> float:
    """Student's t for two-sided 95 %."""
    return student_quantile(0.025, degrees)


def engines_differ(goodput: float, error: float, closed: float | None) -> bool:
    """Whether the simulation, of such a standard error, and the formulas differ by more than
    chance, and so much that it matters: the formulas' assumptions do not hold, and the simulation
    is to be taken. Not where there is no formula (``closed`` None), nor without any failure in any
    trial, where the error is none, or that of rounding.
    """
    if closed is None or error <= NO_ERROR:
        return False
    return abs(closed - goodput) > max(MATTERS, APART * error)


class Model(BaseModel):
    """Base of what is stored: nothing unknown, nothing changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Definitions(Model):
    """What the words mean, as that moves figures of large jobs by 5 to 20 points.

    ``spares_count``: spare nodes are paid for, and so in the denominator of goodput. ``rework``,
    work that is done again: ``apart``, a class of its own; ``recovery``, part of each recovery's
    time; ``useful``, as a count of steps has it. ``missing``, the samples of nodes that a job goes
    on without: ``lost``, or ``useful``, where a step of fewer samples is a whole one.
    """

    failures_while: Literal["running", "always"] = "running"
    spares_count: bool = True
    rework: Literal["apart", "recovery", "useful"] = "apart"
    missing: Literal["lost", "useful"] = "lost"


class Setting(Model):
    """What is asked, as in docs/projection.md; ``_s``: seconds. ``interval_s`` None: what is best
    for each size; ``weibull``: shape of the times between failures, None: a constant rate;
    ``several``: probabilities that a failure takes 1, 2, ... nodes; ``repair_s``, ``repair_sigma``:
    until a lost node is back, lognormal; ``price``: of a GPU-hour; ``quarantine`` and
    ``slow_found_s`` None: never; ``slow_factor``: 1.34 is the completion of jobs of 512 GPUs and
    more with a slow node (failure studies of large clusters).

    ``gaps``: times between failures of a trace, whose shape counts; ``rate_unsure``: half the 95 %
    interval of the rate as a share of it, where it is a trace's own, 1: that or more;
    ``processes``: share of the failures that end processes only, after which no node is repaired;
    ``batch``: samples of a step; ``checkpoint_bytes``, ``bandwidth``: where ``save_s`` and
    ``load_s`` are from them; ``causes``: name -> share of the failures; ``loads_measured``: loading
    is in the recoveries that were measured, so that ``load_s`` is of others only.
    """

    gpus: tuple[int, ...]
    gpus_per_node: int = Field(default=GPUS_PER_NODE, ge=1, le=1024)
    rate: float = Field(gt=0, description="failures per 1,000 nodes and day")
    days: float = Field(default=90.0, gt=0)
    trials: int = Field(default=1000, ge=2, le=1_000_000)
    seed: int = Field(default=0, ge=0)
    save_s: float = Field(default=5.0, ge=0)
    load_s: float = Field(default=120.0, ge=0)
    interval_s: float | None = Field(default=None, gt=0)
    step_s: float = Field(default=20.0, gt=0)
    replica_nodes: int = Field(default=1, ge=1)
    weibull: float | None = Field(default=None, gt=0)
    several: tuple[float, ...] = (1.0,)
    spares: int = Field(default=2, ge=0)
    repair_s: float = Field(default=4 * 3600.0, gt=0)
    repair_sigma: float = Field(default=0.0, ge=0)
    price: float | None = Field(default=None, ge=0)
    lemon_share: float = Field(default=0.0, ge=0, le=1)
    lemon_times: float = Field(default=1.0, gt=0)
    quarantine: int | None = Field(default=None, ge=1, le=100)
    slow_rate: float = Field(default=0.0, ge=0)
    slow_factor: float = Field(default=1.34, ge=1)
    slow_found_s: float | None = Field(default=None, ge=0)
    gaps: tuple[float, ...] = ()
    rate_unsure: float = Field(default=0.0, ge=0)
    availability: float | None = Field(default=None, gt=0, lt=1)
    processes: float = Field(default=0.0, ge=0, le=1)
    batch: int | None = Field(default=None, ge=1)
    checkpoint_bytes: int | None = Field(default=None, ge=0)
    bandwidth: float | None = Field(default=None, gt=0)
    causes: dict[str, float] = {}
    loads_measured: bool = False
    definitions: Definitions = Definitions()


class Spread(Model):
    """How sure a figure is, and how much it differs: ``low``, ``high``: 95 % interval of its mean
    over jobs; ``least``, ``most``: 5 % and 95 % of the jobs. None: without bound.
    """

    low: float | None
    high: float | None
    least: float | None
    most: float | None


class Projected(Model):
    """One strategy at one size. ``goodput``: share of the paid time that is useful, by the
    definitions of the setting, mean of the trials; ``error``: its standard error; ``low``,
    ``high``: its 95 % interval, with what is not known of the mean recovery and of the rate;
    ``worst``, ``best``: 5 % and 95 % of the trials; ``closed``: by the formulas, None where they do
    not apply, ``why`` not. ``badput``: class -> share of the paid time; ``ettr``: useful share of
    the time of the job's own nodes; ``finish_days``: until as much is done as in the days asked for
    without a failure; ``lost_gpu_hours``, ``lost_price``: of those paid.

    ``stall_s``: of a recovery, median at this size; ``recovery_s``: mean time that a failure takes,
    with loading, and with work done again where that is charged to the recovery; ``again``: steps
    done more than once; ``short``: steps that failures kept from being done, of those that the days
    have room for; ``second_gpu_hours``, ``second_price``: what a second more of detection costs, in
    all. ``spreads``: of all these figures by name, of ``badput`` as ``badput.rework``.
    """

    strategy: str
    gpus: int
    nodes: int
    mtbf_s: float
    interval_s: float
    stall_s: float
    recovery_s: float
    goodput: float
    error: float
    low: float
    high: float
    worst: float
    best: float
    closed: float | None
    why: str = ""
    badput: dict[str, float]
    failures: float
    ettr: float
    finish_days: float | None
    again: float
    short: float
    lost_gpu_hours: float
    gpu_hours: float
    price: float | None
    lost_price: float | None = None
    second_gpu_hours: float
    second_price: float | None = None
    spreads: dict[str, Spread]

    @property
    def apart(self) -> float | None:
        """How many standard errors the engines are apart; None with one engine only."""
        if self.closed is None:
            return None
        return abs(self.goodput - self.closed) / self.error if self.error > NO_ERROR else 0.0

    @property
    def differs(self) -> bool:
        """Whether the simulation is to be taken, see ``engines_differ``."""
        return engines_differ(self.goodput, self.error, self.closed)

    @property
    def point(self) -> Point:
        """Its goodput for a comparison: by the formula, which has no error, if it holds."""
        closed = None if self.differs else self.closed
        return Point(
            strategy=self.strategy,
            gpus=self.gpus,
            goodput=self.goodput if closed is None else closed,
            error=self.error if closed is None else 0.0,
            by="simulation" if closed is None else "formula",
        )


class Point(Model):
    """Goodput of a strategy at a size that was not asked for, for its curve. ``by``: formula, or a
    simulation of fewer trials, of standard error ``error``.
    """

    strategy: str
    gpus: int
    goodput: float
    error: float
    by: Literal["formula", "simulation"]

    def ahead_of(self, other: Point) -> int:
        """1: this one is ahead, -1: the other is, 0: nobody knows."""
        apart = self.goodput - other.goodput
        if abs(apart) <= max(TIE, ERRORS * math.hypot(self.error, other.error)):
            return 0
        return 1 if apart > 0 else -1


class BreakEven(Model):
    """The size at which one strategy overtakes another: ``below`` is ahead on smaller ones,
    ``above`` on larger; between ``low`` and ``high`` GPUs. ``by``: ``formula``, to a node;
    ``simulation``, where the line between two sizes of it has equal goodput. ``least``, ``most``:
    its 95 % interval, by what is not known of measured costs and by chance of the simulation; None:
    no end within the sizes that there are.
    """

    below: str
    above: str
    gpus: int
    low: int
    high: int
    least: int | None = None
    most: int | None = None
    by: Literal["formula", "simulation"]


class Cost(Model):
    """Where a strategy's recovery time is from: ``kind``, and ``source`` in words; it is of
    ``nodes`` nodes, and ``per_doubling_s`` longer with each doubling from there on. Of measured
    ones, seconds: ``incidents``, ``ranks`` (median), ``median_s``, ``sigma`` of the logarithms,
    ``low_s`` and ``high_s``, the 95 % interval of the mean (None where too few are known);
    ``phases``: median of each, without work done again; ``redone``: median of the steps that were.
    """

    kind: Literal["measured", "given", "published"]
    source: str
    nodes: float = 1.0
    per_doubling_s: float = 0.0
    incidents: int = 0
    ranks: float | None = None
    median_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    sigma: float | None = None
    phases: dict[str, float] = {}
    redone: float | None = None


class SparesNeeded(Model):
    """The fewest spares with which all nodes of a job are there for a share of the time;
    ``load``: nodes in repair on average. None: more than 2^20.
    """

    gpus: int
    nodes: int
    load: float
    spares: int | None


class Compared(Model):
    """One job of stored runs: its goodput as projected, and as measured in ``measured``, an arm
    each; from the first step to the last, spares not counted.

    ``projected``: mean; ``low``, ``high``: where the mean of so many arms is in 95 % of cases;
    ``measured_low``, ``measured_high``: 95 % interval of the mean of ``measured``, None from one
    arm. ``failures_projected``, ``failures_measured``: an arm; ``mtbf_s``: of the scenario;
    ``stall_s``, ``incidents``: mean time of a recovery where the costs are from, and of how many
    failures; ``away_s``: until what was lost had been replaced; ``undisturbed``: goodput of the
    control arms, which have no fault.
    """

    strategy: str
    ranks: int
    projected: float
    low: float
    high: float
    measured: list[float]
    measured_low: float | None
    measured_high: float | None
    failures_projected: float
    failures_measured: float
    mtbf_s: float
    stall_s: float
    away_s: float
    incidents: int
    undisturbed: float
    costs_from: str

    @property
    def mean(self) -> float:
        """Of what was measured."""
        return sum(self.measured) / len(self.measured)

    @property
    def residual(self) -> float:
        """Measured less projected."""
        return self.mean - self.projected

    @property
    def inside(self) -> bool:
        """Whether what was measured is within the projected interval."""
        return self.low <= self.mean <= self.high


class Projection(Model):
    """Everything that ``chaos project`` says. ``costs``: strategy -> where its recovery is from;
    ``cautions``: what is missing for its intervals to hold; ``compared``: with runs, and
    ``spares``: for the availability, if asked; ``rows`` is empty where only a comparison was.
    ``curve``: sizes that were not asked for; ``break_even``: of each pair of strategies.
    """

    schema_version: int = SCHEMA_VERSION
    setting: Setting
    failures_from: str = ""
    costs: dict[str, Cost] = {}
    cautions: list[str] = []
    notes: list[str] = []
    rows: list[Projected] = []
    curve: list[Point] = []
    break_even: list[BreakEven] = []
    compared: list[Compared] = []
    spares: list[SparesNeeded] = []

    def doubtful(self, one: Projected, other: Projected) -> bool:
        """Whether what is not known of costs and rates may be more than what lies between the
        goodput of two rows, at 95 %.
        """
        chance = t95(self.setting.trials - 1)
        unknown = math.fsum(
            max(row.high - row.goodput, row.goodput - row.low) ** 2 - (chance * row.error) ** 2
            for row in (one, other)
        )
        return (one.point.goodput - other.point.goodput) ** 2 < max(0.0, unknown)
