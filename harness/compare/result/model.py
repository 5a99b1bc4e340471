"""Models of ``compare.json``; everything in it is derived from stored runs by
``harness.compare.result.gather``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from trainchaos.harness.compare.environments.stack import Way
from trainchaos.harness.judge.figures import Metric, Model, Number
from trainchaos.harness.judge.incident import PhaseSpan
from trainchaos.harness.judge.results import FalseAlarms, Survival

SCHEMA_VERSION = 1
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


class OutcomeTraits(NamedTuple):
    """Meaning of a class of outcomes. ``kept``: the job kept its work; ``tried``: the stack was
    really tested; ``mark``: a shape; ``meaning``: one line for the key.
    """

    kept: bool
    tried: bool
    mark: str
    meaning: str


OUTCOMES: Mapping[OutcomeClass, OutcomeTraits] = {
    "masked": OutcomeTraits(True, True, "◉", "training never stopped"),
    "recovered": OutcomeTraits(True, True, "●", "continued where it was"),
    "rolled back": OutcomeTraits(True, True, "◀", "continued from a checkpoint, steps redone"),
    "degraded": OutcomeTraits(True, True, "◐", "continued slower or with fewer ranks"),
    "started over": OutcomeTraits(False, True, "◁", "restarted from step 0, all work lost"),
    "all ranks died": OutcomeTraits(False, True, "✖", "the job ended"),
    "hung": OutcomeTraits(False, True, "‖", "the job stood still until it was stopped"),
    "committed bad values": OutcomeTraits(False, True, "⚠", "trained on damaged state, unnoticed"),
    "not landed": OutcomeTraits(False, False, "◌", "the fault did not take effect; proves nothing"),
    "not offered": OutcomeTraits(False, False, "–", "this stack cannot take part in this fault"),
    "refuted": OutcomeTraits(False, False, "⊗", "its record is not credible, and is ignored"),
}
"""From best to worst."""
FOR_EVER = {name for name, traits in OUTCOMES.items() if traits.tried and not traits.kept}
"""Of these the recovery time is infinity: the job's work is lost, or worthless."""
SAYS_NOTHING = {name for name, traits in OUTCOMES.items() if not traits.tried}

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
    """A stack with one of its settings. ``label``: unique, such as ``torchft tuned``; ``ours``: a
    strategy of this project; ``because``: why these settings are its best documented ones;
    ``versions``: package -> version; ``way``: how it continues after a failure
    (``harness.compare.environments.stack.Way``); ``against``: label of the stack it is compared
    with, empty: the comparison's reference.
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

    ``recovery``: fault to the first new step, for several faults the slowest; infinity: never, only
    from step 0, or with non-finite values; None: training did not stand still, or the fault did not
    land. ``detection``: fault to the first reaction visible from outside. ``goodput``, ``badput``
    (class -> seconds): relative to the fault-free step of the stack ``none`` with the same seed if
    there is one, else of the own control; 0 if the training result is worthless. ``full_rate``,
    ``redundancy``: as in ``chaos run`` (``time_to_full_rate``, ``time_to_redundancy``), for several
    faults the slowest, infinity if ``recovery`` is; the full rate is that of the stack's own
    control. ``ettr``: effective training time ratio, as in ``chaos run``; 0 if the job did not
    finish, or its training result is worthless. ``step_time``: fault-free. ``ranks``: provisioned,
    including spares. ``run``, ``control_run``: directories relative to the comparison's;
    ``witness``: the evidence for ``outcome``; ``note``: what is unknown, and why; ``losses``:
    (step, loss) of the faulted arm and of its control, thinned.
    """

    label: str
    family: str
    seed: int
    outcome: OutcomeClass
    witness: str
    recovery: Number | None = None
    detection: Number | None = None
    phases: list[PhaseSpan] = Field(default=[])
    steps_lost: int = 0
    samples_lost: int | None = None
    goodput: float | None = None
    control_goodput: float | None = None
    badput: dict[str, float] = Field(default={})
    step_time: float | None = None
    wall: float = 0.0
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
    of the ratios, its time over the reference's; ``interval``: 95 %; infinite if one never
    recovers; ``needed``: total number of pairs that would probably settle it if no difference is
    shown, None: too many to estimate.
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
    """A stack under one fault family. ``outcomes``: class -> count; ``worst``: the worst of them;
    ``recovery``, ``full_rate``, ``redundancy``, ``goodput``, ``ettr``, ``overhead``: over trials;
    ``survival``: share of trials whose fault landed that kept the job's work; ``outliers``: seeds
    of flagged values, which are never dropped.
    """

    label: str
    family: str
    n: int = 0
    outcomes: dict[str, int] = Field(default={})
    worst: OutcomeClass
    witness: str
    recovery: Metric | None = None
    detection: Metric | None = None
    goodput: Metric | None = None
    steps_lost: Metric | None = None
    samples_lost: Metric | None = None
    overhead: Metric | None = Field(
        default=None, description="fault-free step over that of the stack `none`, same round"
    )
    phases: dict[str, float] = Field(default={}, description="median seconds, by phase")
    outliers: list[int] = Field(default=[])
    cost_gpu_hours: Number | None = Field(
        default=None, description="of one failure, median: provisioned ranks x recovery time"
    )
    note: str = ""
    full_rate: Metric | None = None
    redundancy: Metric | None = None
    ettr: Metric | None = None
    survival: Survival | None = None


class FaultFreeSummary(Model):
    """A stack while nothing fails, over all its arms. ``spares``: provisioned besides the
    ``ranks``; ``share``: spares' share of all provisioned processes; ``false_alarms``: failures
    detected before any fault had acted.
    """

    label: str
    ranks: int
    spares: int
    share: float
    false_alarms: FalseAlarms


class Comparison(Model):
    """Everything a report of a comparison shows. ``price``: of a GPU hour; ``families``: name ->
    description of its faults; ``skipped``: label -> why it did not run; ``same``: the A/A arm, if
    requested; ``deadline``: seconds without a new step after which a job counts as never recovered;
    ``cautions``: differences between arms besides the stack (machine, code, workload), which make
    pairs unfair; ``missing``: number of arms planned but not played yet; ``script``: families that
    test the training script rather than the stack; ``division``: of docs/benchmark-rules.md;
    ``broken``: rules of the closed division that were broken, if it was claimed.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    started: str
    finished: str | None = None
    machine: dict[str, Any]
    workload: dict[str, Any]
    stacks: list[StackInfo]
    families: dict[str, str]
    trials: list[Trial]
    cells: list[CellSummary] = Field(default=[])
    ratios: list[Ratio] = Field(default=[])
    reference: str = ""
    same: list[Ratio] = Field(default=[])
    skipped: dict[str, str] = Field(default={})
    price: float | None = None
    currency: str = ""
    fidelity: list[str]
    reproduce: str = ""
    deadline: float | None = None
    cautions: list[str] = Field(default=[])
    missing: int = 0
    script: list[str] = Field(default=[])
    division: Literal["closed", "open"] = "open"
    broken: list[str] = Field(default=[])
    at_rest: list[FaultFreeSummary] = Field(default=[])
