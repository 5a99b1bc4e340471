"""Stops a process: it keeps its connections open and does nothing."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Occurrence, StandsStill
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.chaos.fault.targets import ProcessTarget
from trainchaos.chaos.fault.witness import effects


class ProcessStop(Fault):
    """SIGSTOP through the held pidfd: a rank that hangs while its connections stay open. Real.

    Without a ``duration`` the process hangs until the end of the run. Landed: the kernel shows the
    process stopped.
    """

    where: ClassVar[Where] = Where.PROCESS
    simulated: ClassVar[bool] = True
    may_last: ClassVar[bool] = True

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Stop the process."""
        target.signal(signal.SIGSTOP)
        return {"signal": "SIGSTOP"}

    def heal(self, target: ProcessTarget) -> None:
        """Continue the process. If it was fenced meanwhile, it was killed."""
        target.signal(signal.SIGCONT)

    def follows(self) -> tuple[Consequence, ...]:
        """The process does nothing until healed."""
        return (StandsStill(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """State T (stopped) in the kernel's process table."""
        for _, seen in effects(occurrence, events):
            if (state := seen.get("os_state")) in ("T", "t"):
                return Landed(witness="kernel: process state", evidence={"os_state": state})
        return None
