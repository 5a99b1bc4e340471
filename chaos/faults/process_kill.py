"""Kills a process."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, Ends
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import ProcessTarget
from chaos.fault.witness import killed


class ProcessKill(Fault):
    """SIGKILL through the held pidfd: an out-of-memory kill, a lost host, a crashed runtime. Real.

    Landed: the kernel reports the process ended by that signal, and its supervisor had not sent it.
    """

    where: ClassVar[Where] = Where.PROCESS

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Kill the process."""
        target.signal(signal.SIGKILL)
        return {"signal": "SIGKILL"}

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(signal=signal.SIGKILL),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit status, unless its supervisor had asked it to end."""
        return killed(occurrence, events, signal.SIGKILL)
