"""What a played scenario reached: stages of the controller with the messages, failures and faults
that occurred in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.run.orchestrator import Orchestrator
from trainchaos.recovery.process.host import (
    Dying,
    Exited,
    MessageReceived,
    Report,
)

Feature = tuple[str, ...]
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "heard": "stage × message",
        "hit": "stage × fault × phase",
        "failed": "stage × cause of a failure",
        "decided": "stage × decision",
        "damage": "damage × event",
    }
)
"""First word of a feature -> what it counts."""


class Observed(Orchestrator):
    """An arm that records what it reached."""

    reached: set[Feature]

    def __init__(self, *args: Any, **named: Any) -> None:
        self.reached = set()
        super().__init__(*args, **named)

    def hear(self, report: Report) -> None:
        self.reached.add(("heard", self.controller.stage.value, _word(report)))
        super().hear(report)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event, as every arm does."""
        self.reached.update(features_of(self.controller.stage.value, kind, data))
        return super().record(kind, step=step, generation=generation, **data)


def features_of(stage: str, kind: Kind, data: Mapping[str, Any]) -> Iterator[Feature]:
    """What an event says was reached."""
    if kind is Kind.FAULT_INJECTED:
        yield ("hit", stage, data["kind"], str(data.get("phase")))
    elif kind is Kind.FAILURE_DETECTED:
        yield ("failed", stage, data["cause"])
    elif kind is Kind.DECISION:
        yield from (("decided", stage, str(act).partition("(")[0]) for act in data["actions"])


def _word(report: Report) -> str:
    if isinstance(report, MessageReceived):
        return type(report.message).__name__
    if isinstance(report, Exited):
        return "killed" if report.signal else "ended" if report.exit_code == 0 else "failed"
    return "dying" if isinstance(report, Dying) else type(report).__name__


@dataclass(kw_only=True)
class Coverage:
    """Coverage of a search. ``times``: feature -> number of scenarios that reached it."""

    times: Counter[Feature] = field(default_factory=Counter)

    def add(self, reached: Collection[Feature]) -> int:
        """Count a scenario's features; returns how many of them are new."""
        new = sum(feature not in self.times for feature in reached)
        self.times.update(set(reached))
        return new

    def rows(self) -> list[tuple[str, int, int]]:
        """(what was counted, number of different features, number seen once only), for people;
        omits what was not looked for.
        """
        found = []
        for name, text in WORDS.items():
            mine = [times for feature, times in self.times.items() if feature[0] == name]
            if mine:
                found.append((text, len(mine), sum(times == 1 for times in mine)))
        return found
