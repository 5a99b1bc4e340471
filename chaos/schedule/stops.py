"""Evaluates stop conditions, in the same way for a built-in job and a command. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.sla import OPERATORS, StopRule


@dataclass(kw_only=True)
class FailureTally:
    """Failures counted from the orchestrator's events."""

    failures: int = 0
    nonfinite: bool = False

    def observe(self, event: Event) -> None:
        """Count one event."""
        if event.kind is Kind.FAILURE_DETECTED:
            self.failures += 1
            self.nonfinite = self.nonfinite or event.data["cause"] == "nonfinite"


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """The state of a job. ``idle_s``: since the last commit; ``wall_s``: since the arm began;
    ``healthy``: replicas whose ranks are all held by live processes, None until training has begun.
    """

    idle_s: float
    wall_s: float
    healthy: int | None
    failures: int
    nonfinite: bool


def to_stop(rules: Sequence[StopRule], facts: JobSnapshot) -> str | None:
    """The first condition that holds, with what was seen; None when none does."""
    for rule in rules:
        seen = _seen(rule.name, facts)
        if seen is None:
            continue
        if rule.name == "loss_nonfinite":
            if seen:
                return "loss_nonfinite: a non-finite loss or gradient was seen"
        elif OPERATORS[rule.op](seen, rule.limit):
            about_time = rule.name in ("no_committed_step_for", "wall_time")
            return rule.text if about_time else f"{rule.text}: {rule.name} is {seen:g}"
    return None


def _seen(name: str, facts: JobSnapshot) -> float | None:
    known: dict[str, float | None] = {
        "no_committed_step_for": facts.idle_s,
        "wall_time": facts.wall_s,
        "healthy_replicas": facts.healthy,
        "failures": facts.failures,
        "loss_nonfinite": float(facts.nonfinite),
    }
    return known[name]
