"""The shape of an incident in ``results.json``."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field

from trainchaos.harness.judge.figures import Model, Number

PHASE_NAMES = ("detect", "abort", "regroup", "restore", "redo", "first step")
Outcome = Literal[
    "masked", "recovered", "fail-stop", "sdc-escape", "hang", "degraded", "not-landed"
]


class PhaseSpan(Model):
    """One recovery phase: seconds, and start relative to the injection in seconds."""

    name: str
    start: float
    seconds: float


class Hit(Model):
    """One target of an act that had several. Times in seconds since the act began; see
    ``Incident``.
    """

    occurrence: int
    target: dict[str, Any]
    landed: bool
    healed: bool
    outcome: str
    detected_by: str | None
    detection_time: Number | None
    recovery_time: Number | None
    steps_lost: int


class Incident(Model):
    """One act of a fault in one arm, on one target or several at once, and how the system handled
    it (``harness.judge.measure.incidents``: how several targets are combined).
    """

    fault: str
    kind: str
    cell: str
    repeat: int
    occurrence: int = Field(
        description="of its first target, from 0; negative: planned, never fired"
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
    detection_time: Number | None = Field(
        description="seconds; Infinity: it did harm and was never noticed"
    )
    recovery_time: Number | None = Field(
        description="seconds; Infinity: no recovery; None: masked, or no step was left to commit"
    )
    outcome: Outcome
    phases: list[PhaseSpan]
    steps_lost: int = Field(
        description="redone; 0 also if they were never redone, see never_recovered"
    )
    steps_lost_unsure: Literal["at most", "not known"] | None = Field(
        default=None,
        description="of a command whose steps are seen every so many: steps_lost is the most that"
        " it can be; not known: nothing says more",
    )
    restored_step: int | None
    first_new_step: int | None
    decision: str
    nodes: list[int] = Field(
        default=[], description="that it acted on, directly or through their processes"
    )
    clock_bound_s: float = Field(
        default=0.0,
        description="largest error of recovery_time, for the clocks of the nodes",
    )
    hits: list[Hit] = Field(default=[], description="every target, where the act had several")
    time_to_full_rate: Number | None = Field(
        default=None, description="seconds; None: too few steps to tell"
    )
    time_to_redundancy: Number | None = Field(
        default=None,
        description="seconds; None: nothing was lost, or the arm ended too early to know",
    )
    answered_with: str | None = Field(
        default=None,
        description="fault whose rollback answered this one too: the steps lost are counted there",
    )

    @property
    def lost(self) -> str:
        """The steps lost, for people."""
        if self.never_recovered:
            return "all"
        if self.steps_lost_unsure == "not known":
            return f"not known, at most {self.steps_lost}"
        return f"{'≤ ' if self.steps_lost_unsure else ''}{self.steps_lost}"

    @property
    def occurrences(self) -> tuple[int, ...]:
        """Numbers of all its occurrences."""
        return tuple(hit.occurrence for hit in self.hits) or (self.occurrence,)

    @property
    def fired(self) -> bool:
        """Whether it was injected at all."""
        return self.occurrence >= 0

    @property
    def never_recovered(self) -> bool:
        """Whether the job never recovered from it, so that all its work is lost."""
        return self.recovery_time == math.inf
