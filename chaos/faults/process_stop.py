"""A process hangs: it stays, holds its connections, and does nothing."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, StandsStill
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import ProcessTarget
from chaos.fault.witness import effects


class ProcessStop(Fault):
    """SIGSTOP through the held pidfd: a rank that hangs while its connections stay open. Real.

    Without a ``duration`` it hangs until the end of the run. Landed: the kernel shows the process
    stopped.
    """

    where: ClassVar[Where] = Where.PROCESS
    may_last: ClassVar[bool] = True

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Stop it."""
        target.signal(signal.SIGSTOP)
        return {"signal": "SIGSTOP"}

    def heal(self, target: ProcessTarget) -> None:
        """Let it go on; whoever fenced it meanwhile has killed it."""
        target.signal(signal.SIGCONT)

    def follows(self) -> tuple[Consequence, ...]:
        """Nothing, until it is healed."""
        return (StandsStill(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """State T in the kernel's process table, or the later kill of a process seen stopped."""
        for _, seen in effects(occurrence, events):
            if (state := seen.get("os_state")) in ("T", "t"):
                return Landed(witness="kernel: process state", evidence={"os_state": state})
        return None
