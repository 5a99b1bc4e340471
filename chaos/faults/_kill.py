"""Bases of the faults that kill processes or whole nodes at once."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.aftermath import Consequence, Ends, Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Need, Where
from trainchaos.chaos.fault.targets import NodeTarget, ProcessTarget
from trainchaos.chaos.fault.witness import killed, machines_ended


class KillsProcess(Fault):
    """SIGKILL to one process."""

    where: ClassVar[Where] = Where.PROCESS
    simulated: ClassVar[bool] = True

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


class KillsNodes(Fault):
    """All processes of the chosen nodes, or their machines, are killed."""

    where: ClassVar[Where] = Where.NODE
    simulated: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Kill the nodes."""
        return target.kill()

    def follows(self) -> tuple[Consequence, ...]:
        """All their processes end."""
        return (Ends(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The platform's report on the machines, and the exits of all processes."""
        return machines_ended(occurrence, events, signal.SIGKILL)
