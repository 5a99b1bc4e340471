"""Raises an exception in a rank's training code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import Consequence, Occurrence, RaisesAndEnds
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import RankTarget
from trainchaos.chaos.fault.witness import effects_of, said_by_script


class InjectedError(RuntimeError):
    """Raised by this fault in training code."""


class RaiseError(Fault):
    """An uncaught exception on the training thread: a bug, a bad file, a driver error. Real.

    ``message``: its text. Landed: the process ended with an exit code, not a signal. A script that
    calls ``beacon.point`` may catch the exception and live on: there, the script reports that
    it raises, and the evidence includes the error if it was printed.
    """

    where: ClassVar[Where] = Where.RANK
    simulated: ClassVar[bool] = True
    by_script: ClassVar[str] = "raise"

    message: str = "injected failure"

    def act(self, target: RankTarget) -> Mapping[str, Any]:
        """Raise."""
        raise InjectedError(f"{self.message} (step {target.step}, rank {target.rank})")

    def for_script(self, step: int) -> str:
        """The text of the exception."""
        return f"{self.message} (step {step})"

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends, except in a script, which may catch the exception and live on."""
        return (RaisesAndEnds(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit code, and the last error the rank logged."""
        if said := said_by_script(occurrence, events, self.by_script):
            printed = [e["output"] for e in effects_of(occurrence, events) if "output" in e]
            witness = "process: the error it printed" if printed else "script: its own word"
            return Landed(
                witness=witness, evidence={**said, **({"output": printed[0]} if printed else {})}
            )
        raised = [
            e for e in events if e.kind is Kind.ERROR_RAISED and e.actor == occurrence.process
        ]
        ours = bool(raised) and raised[-1].data["type"] == InjectedError.__name__
        for event in events:
            if event.kind is Kind.PROCESS_EXITED and event.data["process"] == occurrence.process:
                if not event.data["exit_code"] or not ours:
                    return None
                evidence = {"exit_code": event.data["exit_code"], "error": raised[-1].data["type"]}
                return Landed(witness="kernel: wait status", evidence=evidence)
        return None
