"""Kills a waiting spare."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, Ends
from chaos.fault.base import Fault, Landed, Occurrence, Where
from chaos.fault.targets import ProcessTarget
from chaos.fault.witness import killed


class SpareKill(Fault):
    """SIGKILL to a waiting spare: it must be replaced before it is needed, without disturbing
    training. Real.

    Its targets are spares, whatever the scenario's ``role`` says. Landed: the kernel reports the
    process ended by that signal, and its supervisor had not sent it.
    """

    where: ClassVar[Where] = Where.PROCESS
    harmless: ClassVar[bool] = True
    role: ClassVar[Literal["worker", "spare"] | None] = "spare"

    def act(self, target: ProcessTarget) -> Mapping[str, Any]:
        """Kill the spare."""
        target.signal(signal.SIGKILL)
        return {"signal": "SIGKILL"}

    def follows(self) -> tuple[Consequence, ...]:
        """The process ends."""
        return (Ends(signal=signal.SIGKILL),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit status."""
        return killed(occurrence, events, signal.SIGKILL)
