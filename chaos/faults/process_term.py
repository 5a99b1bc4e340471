"""Ends a process after a notice period."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.aftermath import Consequence, EndsWithin, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import ProcessTarget
from trainchaos.chaos.fault.witness import exit_of


class ProcessTerm(Fault):
    """SIGTERM through the held pidfd, then, after ``grace_s`` seconds, SIGKILL if the process still
    lives: the notice a cloud gives before it reclaims a machine. Real.

    The strategy decides how to use the notice: a last checkpoint, or a move to a spare before the
    deadline. Landed: the process's own signal handler reported the signal, or the kernel reports
    that the process ended after it, by a signal or with any exit code but 0: programs answer a
    notice with 1, 2, 3, 15 and others.
    """

    where: ClassVar[Where] = Where.PROCESS
    simulated: ClassVar[bool] = True
    gives_notice: ClassVar[bool] = True

    grace_s: float = Field(default=30.0, ge=0, le=3600, description="seconds until SIGKILL")

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Send the notice, and schedule the kill."""
        target.signal(signal.SIGTERM)
        target.signal_later(signal.SIGKILL, self.grace_s)
        return {"signal": "SIGTERM", "grace_s": self.grace_s}

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends by the deadline."""
        return (EndsWithin(seconds=self.grace_s),)

    def shows_after_s(self) -> float:
        """The grace period: a stopped process cannot handle the notice, so evidence comes only with
        its kill at the deadline.
        """
        return self.grace_s

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The notice as reported by the process, or the end of one that reports none, unless its
        supervisor asked it to end meanwhile.
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
        sent = signum in (signal.SIGTERM, signal.SIGKILL)
        if not sent and (code == 0 or ended.data.get("asked_ns") is not None):
            return None  # a job that is done ends so too
        return Landed(witness="kernel: wait status", evidence={"exit_code": code, "signal": signum})
