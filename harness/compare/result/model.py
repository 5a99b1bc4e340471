"""The shape of ``compare.json``: everything in it is derived from stored runs by
``harness.compare.result.gather``.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from harness.compare.environments.stack import Way
from harness.judge.figures import Metric, Model
from harness.judge.incident import PhaseSpan
from harness.judge.results import FalseAlarms, Survival

SCHEMA_VERSION = 1
_NAMES = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _to_json(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


Number = Annotated[
    float,
    BeforeValidator(lambda value: _NAMES.get(value, value) if isinstance(value, str) else value),
    PlainSerializer(_to_json),
]
"""A number that may be infinite (never recovered) or no number (a loss); words in JSON, which has
neither.
"""

OutcomeClass = Literal[
    "masked",
    "recovered",
    "rolled back",
    "degraded",
    "started over",
    "all ranks died",
    "hung",
    "committed bad values",
    "not landed",
    "not offered",
    "refuted",
]
"""What became of a job. ``rolled back``: recovered from a checkpoint, steps were done again;
``started over``: from step 0; ``degraded``: went on slower or with fewer ranks to its end;
``committed bad values``: a non-finite or corrupted state was trained on unnoticed; ``not offered``:
this stack cannot be put under this fault, and the note says why; ``refuted``: its record cannot be
what happened, and counts for nothing (``harness.compare.result.believed``).
"""

Difference = Literal[
    "faster",
    "slower",
    "no difference shown",
    "only this one recovers",
    "only the other recovers",
    "neither recovers",
    "too few",
]


class StackInfo(Model):
    """One compared thing: a stack with one of its settings. ``label``: unique, such as ``torchft
    tuned``; ``ours``: a strategy of this project; ``because``: why these settings are its best
    documented ones; ``versions``: package -> version; ``way``: how it goes on after a failure
    (``harness.compare.environments.stack.Way``); ``against``: label of the stack that it is set
    against, empty: the comparison's reference.
    """

    label: str
    stack: str
    settings: Literal["default", "tuned"]
    ours: bool
    description: str
    chosen: dict[str, Any]
    because: str
    versions: dict[str, str]
    fidelity: list[str]
    way: Way = "restart"
    against: str = ""


class Trial(Model):
    """One pair of arms: with the fault and without. Times in seconds.

    ``recovery``: fault to the first new step, of several faults the slowest; infinity: never, or
    only from step 0, or with values that are no numbers; None: training did not stand still, or the
    fault did not land. ``detection``: fault to the first reaction that can be seen from outside.
    ``goodput``, ``badput`` (class -> seconds): against the fault-free step of the stack ``none``
    with the same seed where there is one, else the own control's; 0 where what was trained is
    worthless. ``full_rate``, ``redundancy``: as ``chaos run`` has them (``time_to_full_rate``,
    ``time_to_redundancy``), of several faults the slowest, infinity where ``recovery`` is; the full
    rate is that of the stack's own control. ``ettr``: effective training time ratio, as ``chaos
    run`` has it; 0 where the job did not come to its end, or what was trained is worthless.
    ``step_time``: fault-free. ``ranks``: provisioned, spares too. ``run``, ``control_run``:
    directories relative to the comparison's; ``witness``: the evidence for ``outcome``; ``note``:
    what could not be known, and why; ``losses``: (step, loss) of the faulted arm and of its
    control, thinned.
    """

    label: str
    family: str
    seed: int
    outcome: OutcomeClass
    witness: str
    recovery: Number | None
    detection: Number | None
    phases: list[PhaseSpan]
    steps_lost: int
    samples_lost: int | None
    goodput: float | None
    control_goodput: float | None
    badput: dict[str, float]
    step_time: float | None
    wall: float
    ranks: int
    verdict: str
    run: str
    reproduce: str
    control_run: str = ""
    note: str = ""
    full_rate: Number | None = None
    redundancy: Number | None = None
    ettr: float | None = None
    losses: tuple[tuple[int, Number], ...] = ()
    control_losses: tuple[tuple[int, Number], ...] = ()


class Ratio(Model):
    """A stack against the reference under one family, by pairs of the same seed. ``value``: median
    of the ratios, its time over the reference's; ``interval``: 95 %; infinite where one never
    recovers; ``needed``: pairs in all that would probably settle it where no difference is shown,
    None: more than can be told.
    """

    label: str
    against: str
    family: str
    metric: Literal["recovery", "step_time", "goodput"]
    n: int
    value: Number | None
    interval: tuple[Number, Number] | None
    says: Difference
    needed: int | None = None


class CellSummary(Model):
    """A stack under one fault family. ``outcomes``: class -> how often; ``worst``: the least good
    of them; ``recovery``, ``full_rate``, ``redundancy``, ``goodput``, ``ettr``, ``overhead``: over
    trials; ``survival``: of the trials whose fault landed, those that kept the job's work;
    ``outliers``: seeds of flagged, never dropped values.
    """

    label: str
    family: str
    n: int
    outcomes: dict[str, int]
    worst: OutcomeClass
    witness: str
    recovery: Metric | None
    detection: Metric | None
    goodput: Metric | None
    steps_lost: Metric | None
    samples_lost: Metric | None
    overhead: Metric | None = Field(
        description="fault-free step over that of the stack `none`, same round"
    )
    phases: dict[str, float] = Field(description="median seconds, by phase")
    outliers: list[int]
    cost_gpu_hours: Number | None = Field(
        description="of one failure, median: provisioned ranks x recovery time"
    )
    note: str = ""
    full_rate: Metric | None = None
    redundancy: Metric | None = None
    ettr: Metric | None = None
    survival: Survival | None = None


class AtRest(Model):
    """A stack while nothing fails, over all its arms. ``spares``: provisioned beside the ``ranks``;
    ``share``: of them in all that is provisioned; ``false_alarms``: failures seen while no fault
    had acted.
    """

    label: str
    ranks: int
    spares: int
    share: float
    false_alarms: FalseAlarms


class Comparison(Model):
    """Everything a report of a comparison shows. ``price``: of a GPU hour; ``families``: name ->
    what is done to the job; ``skipped``: label -> why it did not run; ``same``: the A/A arm, if it
    was asked for; ``deadline``: seconds without a new step after which a job counts as never
    recovered; ``cautions``: what differs between arms beside the stack (machine, code, workload),
    so that they are no fair pair; ``missing``: arms planned and not played yet; ``script``:
    families that test the training script rather than the stack; ``division``: of
    docs/benchmark-rules.md; ``broken``: rules of the closed division that were broken, where it was
    claimed.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    started: str
    finished: str | None
    machine: dict[str, Any]
    workload: dict[str, Any]
    stacks: list[StackInfo]
    families: dict[str, str]
    trials: list[Trial]
    cells: list[CellSummary]
    ratios: list[Ratio]
    reference: str
    same: list[Ratio]
    skipped: dict[str, str]
    price: float | None
    currency: str
    fidelity: list[str]
    reproduce: str
    deadline: float | None = None
    cautions: list[str] = Field(default=[])
    missing: int = 0
    script: list[str] = Field(default=[])
    division: Literal["closed", "open"] = "open"
    broken: list[str] = Field(default=[])
    at_rest: list[AtRest] = Field(default=[])
