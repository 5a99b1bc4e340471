"""Scenario model of one fault: kind, target, trigger, duration, expectation. See
``chaos.scenario.model``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from trainchaos.chaos.scenario.forms import Form, Seconds, SomeSeconds, in_seconds

PHASES = ("data", "forward", "backward", "collective", "optimizer", "checkpoint")
Phase = Literal["data", "forward", "backward", "collective", "optimizer", "checkpoint", "any"]
EventName = Literal[
    "checkpoint_saving",
    "checkpoint_committed",
    "recovery_started",
    "regroup",
    "restore",
    "recovered",
    "place_checked",
    "data",
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=80)]
Step = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]

MAX_OCCURRENCES = 10_000
"""A trigger that would fire more often than this is rejected as a mistake."""
DEFAULT_ARRIVALS = 100
"""Arrivals of ``mtbf`` and ``weibull`` without ``max``: more than a run of an hour at one in 40 s.
"""


class Strict(BaseModel):
    """Base of every scenario model: unknown keys and later changes are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CheckpointTargetSpec(Strict):
    """A checkpoint of a given step."""

    step: int = Field(ge=1)


class CountTarget(Strict):
    """That many of the candidates."""

    count: int = Field(ge=1)


class PercentTarget(Strict):
    """That share of the candidates, rounded up."""

    percent: float = Field(gt=0, le=100)


class LinkTargetSpec(Strict):
    """The path from one rank to another; without ``dst``, to all others."""

    src: int = Field(ge=0)
    dst: int | None = Field(default=None, ge=0)


class Exclusion(Strict):
    """Ranks and nodes that are never chosen."""

    ranks: list[Index] = Field(default_factory=list)
    nodes: list[Index] = Field(default_factory=list)


class TargetSpec(Strict):
    """What the fault hits. ``rank`` or ``link`` names one target; ``replica`` names all ranks that
    hold one copy of the model, or with ``select`` some of them; otherwise ``role``, ``node`` and
    ``rack`` narrow the candidates, and ``select`` chooses among them with the seed.

    ``minority`` is the largest number below half of the candidates, ``majority`` the smallest above
    it; both, and ``percent``, are counted before ``exclude`` applies. ``role: launcher``: the
    process that a command starts as, such as torchrun, a shell, ``conda run``, alone.
    """

    role: Literal["worker", "spare", "coordinator", "launcher", "any"] = "worker"
    rank: int | None = Field(default=None, ge=0)
    replica: int | None = Field(default=None, ge=0)
    node: int | None = Field(default=None, ge=0)
    rack: int | None = Field(default=None, ge=0)
    link: LinkTargetSpec | None = None
    checkpoint: (
        Annotated[
            Literal["latest"] | CheckpointTargetSpec,
            Form("latest or {step: n}", step=CheckpointTargetSpec),
        ]
        | None
    ) = None
    select: Annotated[
        Literal["one", "all", "minority", "majority"] | CountTarget | PercentTarget,
        Form(
            "one, all, minority, majority, {count: n} or {percent: n}",
            count=CountTarget,
            percent=PercentTarget,
        ),
    ] = "one"
    exclude: Exclusion = Exclusion()

    @model_validator(mode="after")
    def _whole_replica(self) -> TargetSpec:
        if self.replica is not None and "select" not in self.model_fields_set:
            self.__dict__["select"] = "all"  # as if it had been written, in what is stored too
        return self


class WeibullSpec(Strict):
    """Gaps between arrivals with this mean (seconds) and shape; with a shape below 1, failures come
    in bursts.
    """

    mean: SomeSeconds = Field(description="seconds, or a string such as 30s")
    shape: float = Field(gt=0.05, le=20)


class TraceSpec(Strict):
    """A trace that was read: its times in seconds after the first step starts, or its steps.

    In YAML the name of a CSV or JSON file; the resolved scenario holds its content.
    """

    file: str
    times: list[Annotated[float, Field(ge=0)]] = Field(
        default_factory=list, max_length=MAX_OCCURRENCES
    )
    steps: list[Step] = Field(default_factory=list, max_length=MAX_OCCURRENCES)


class TriggerSpec(Strict):
    """When the fault fires. Exactly one of ``step``, ``steps``, ``from`` with ``until``, ``time``
    (seconds after the first step starts), ``event``, ``mtbf``, ``weibull`` or ``trace``.

    ``step: 77`` means: while step 77 is computed, when 76 steps are committed. ``probability`` is
    decided by the seed, separately for each step, time or event.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    step: Step | None = None
    steps: list[Step] | None = Field(default=None, min_length=1, max_length=MAX_OCCURRENCES)
    from_: Step | None = Field(default=None, alias="from", description="first step of a range")
    until: Step | None = Field(default=None, description="last step of a range")
    every: Step | None = Field(
        default=None, description="gap between the steps of a range; default 1"
    )
    time: Seconds | None = Field(default=None, description="seconds, or a string such as 2.5s")
    mtbf: SomeSeconds | None = Field(
        default=None,
        description="mean seconds between random (Poisson) arrivals, or a string such as 30s",
    )
    weibull: WeibullSpec | None = None
    trace: (
        Annotated[str | TraceSpec, Form("the name of a CSV or JSON file", file=TraceSpec)] | None
    ) = Field(default=None, description="CSV or JSON file with times or steps")
    event: EventName | None = None
    nth: int = Field(default=1, ge=1, description="which occurrence of the event")
    phase: Phase | None = Field(default=None, description="default: data, the start of the step")
    probability: float = Field(default=1.0, ge=0, le=1)
    max: int | None = Field(
        default=None,
        ge=1,
        le=MAX_OCCURRENCES,
        description="most arrivals of mtbf or weibull; default 100",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> TriggerSpec:
        names = {
            name: getattr(self, name)
            for name in ("step", "steps", "time", "event", "mtbf", "weibull", "trace")
        }
        given = [name for name, value in {**names, "from": self.from_}.items() if value is not None]
        if len(given) != 1:
            raise ValueError(
                "needs exactly one of step, steps, from, time, event, mtbf, weibull, trace; "
                f"has {', '.join(given) or 'none'}"
            )
        (chosen,) = given
        in_steps = ("step", "steps", "from") + (("trace",) if not _has_times(self.trace) else ())
        for name, fits in (
            ("phase", in_steps),
            ("until", ("from",)),
            ("every", ("from",)),
            ("max", ("mtbf", "weibull")),
        ):
            if getattr(self, name) is not None and chosen not in fits:
                raise ValueError(f"{name} goes with {_either(fits)}, not with {chosen}")
        if self.nth != 1 and chosen != "event":
            raise ValueError(f"nth goes with event, not with {chosen}")
        self._row_fits()
        return self

    def _row_fits(self) -> None:
        if self.from_ is None:
            return
        if self.until is None:
            raise ValueError(
                f"from needs until, the last step: {{from: {self.from_}, until: {self.from_ + 50}}}"
            )
        if self.until < self.from_:
            raise ValueError(
                f"until must be at least {self.from_}, where from starts, not {self.until}"
            )
        count = (self.until - self.from_) // (self.every or 1) + 1
        if count > MAX_OCCURRENCES:
            raise ValueError(f"until {self.until} makes {count} steps, more than {MAX_OCCURRENCES}")

    def all_steps(self) -> tuple[int, ...]:
        """The steps named, in order; () for a trigger by time or event."""
        if self.from_ is not None and self.until is not None:
            return tuple(range(self.from_, self.until + 1, self.every or 1))
        if isinstance(self.trace, TraceSpec):
            return tuple(sorted(set(self.trace.steps)))
        if self.event == "data":  # the nth batch is taken at the start of step n
            return (self.nth,)
        return tuple(sorted(set(self.steps or ([self.step] if self.step is not None else []))))


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _has_times(trace: str | TraceSpec | None) -> bool:
    return isinstance(trace, TraceSpec) and bool(trace.times)


class StepsDuration(Strict):
    """A duration counted in steps of the target."""

    steps: int = Field(ge=1)


class MaxRetrigger(Strict):
    """Fire again after a rollback, ``max`` times in all."""

    max: int = Field(ge=1)


Alarm = Literal[
    "straggler",
    "gradient-spike",
    "loss-spike",
    "throughput-drop",
    "digest-mismatch",
    "hang",
    "ecc-acceleration",
    "ecc-uncorrected",
    "thermal-limit",
    "slow-link",
    "idle-device",
]
"""What the detectors of ``recovery.health`` call themselves."""


ExpectedOutcome = Literal["masked", "recovered", "fail-stop", "sdc-escape", "degraded", "hang"]


class ExpectSpec(Strict):
    """Expected outcome of the fault; a different outcome fails the run.

    ``blame: rank``: the failure must be blamed on the rank hit; ``none``: no rank may be blamed.
    ``alarm``: the health detector that must raise an alarm of the place hit, and no other place may
    have one; ``alarm_within``: steps after the fault. ``preflight``: what a check of the place hit
    must find before a process rejoins there; one that is ``unfit`` is not used again while there is
    another, one that is ``fit`` is.
    """

    outcome: (
        Annotated[
            Annotated[ExpectedOutcome, Tag("one")]
            | Annotated[list[ExpectedOutcome], Field(min_length=1), Tag("several")],
            Discriminator(lambda given: "several" if isinstance(given, list) else "one"),
        ]
        | None
    ) = Field(default=None, description="one, or a list of those that are all right")
    detected_by: (
        Literal["exit", "hang", "error", "nonfinite", "diverged", "notice", "warning"] | None
    ) = None
    blame: Literal["rank", "none"] | None = None
    alarm: Alarm | None = None
    alarm_within: int | None = Field(default=None, ge=1, le=1_000_000)
    preflight: Literal["fit", "unfit"] | None = None

    @property
    def outcomes(self) -> list[ExpectedOutcome]:
        """All that are all right; empty: any is."""
        return [self.outcome] if isinstance(self.outcome, str) else self.outcome or []

    @model_validator(mode="after")
    def _within_of_an_alarm(self) -> ExpectSpec:
        if self.alarm_within is not None and self.alarm is None:
            raise ValueError("alarm_within: of which alarm? say expect.alarm too")
        return self


class FaultSpec(Strict):
    """One planned fault. ``params`` are parameters of the kind; ``duration`` limits faults that
    last.

    ``verify``: conditions on the evidence that the fault landed, such as ``{measured_mbit_per_s: "<
    30"}``.
    """

    id: Name
    kind: str
    params: dict[str, Any] = Field(default_factory=dict)
    target: TargetSpec = TargetSpec()
    at: TriggerSpec
    duration: (
        Annotated[
            float | StepsDuration,
            Form("seconds (2.5 or '2.5s') or {steps: n}", in_seconds, steps=StepsDuration),
        ]
        | None
    ) = Field(default=None, description="seconds (or 2s), or {steps: n}")
    retrigger: Annotated[
        Literal["once", "every_attempt"] | MaxRetrigger,
        Form("once, every_attempt or {max: n}", max=MaxRetrigger),
    ] = "once"
    verify: dict[str, Any] = Field(default_factory=dict)
    expect: ExpectSpec = ExpectSpec()
