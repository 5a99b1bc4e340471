"""A process is told that it will be ended soon, and then it is."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from chaos.events.log import Event, Kind
from chaos.fault.aftermath import Consequence, GoneBy
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import ProcessTarget
from chaos.fault.witness import exit_of

EXIT_TERMINATED = 128 + signal.SIGTERM  # what shells and well-behaved programs say


class ProcessTerm(Fault):
    """SIGTERM through the held pidfd, ``grace_s`` seconds, then SIGKILL if it still lives: the
    notice a cloud gives before it takes a machine back. Real.

    What is done with the notice is the strategy's: a last checkpoint, or a move to a spare before
    the deadline. Landed: the process's own handler said that the signal came, or the kernel reports
    that it ended by it.
    """

    where: ClassVar[Where] = Where.PROCESS

    grace_s: float = Field(default=30.0, ge=0, le=3600, description="seconds until SIGKILL")

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Tell it, and see to it that the deadline is kept."""
        target.signal(signal.SIGTERM)
        target.signal_later(signal.SIGKILL, self.grace_s)
        return {"signal": "SIGTERM", "grace_s": self.grace_s}

    def follows(self) -> tuple[Consequence, ...]:
        """Its end, at the deadline at the latest."""
        return (GoneBy(seconds=self.grace_s),)

    def shows_after_s(self) -> float:
        """A process that is stopped hears of nothing, and shows it when it is killed at the
        deadline.
        """
        return self.grace_s

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The notice as its receiver passed it on, or the exit status of one that has no
        handler.
        """
        for event in events:
            notice = event.kind is Kind.FAILURE_DETECTED and event.data["cause"] == "notice"
            if notice and event.data["process"] == occurrence.process:
                return Landed(
                    witness="rank: signal handler", evidence={"heard": event.data["detail"]}
                )
        ended = exit_of(occurrence, events)
        if ended is None:
            return None
        code, signum = ended.data["exit_code"], ended.data["signal"]
        if code == EXIT_TERMINATED or signum in (signal.SIGTERM, signal.SIGKILL):
            return Landed(
                witness="kernel: wait status", evidence={"exit_code": code, "signal": signum}
            )
        return None
