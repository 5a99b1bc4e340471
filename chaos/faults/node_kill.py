"""A node is lost with everything on it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, Ends
from chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from chaos.fault.targets import NodeTarget
from chaos.fault.witness import machines_ended


class NodeKill(Fault):
    """The node ends at once with everything on it, as by power loss or a kernel panic. Real: its
    machine is killed where it has one (a container); where nodes are only names (the local
    launcher), all its processes are.

    One incident, however many processes. Where machines can begin anew, so does this one: it is
    thought of as replaced. Landed: the platform says that the machine ended; without one, the
    kernel reports that each of its processes ended by SIGKILL, which no supervisor had sent before.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Kill it."""
        return target.kill()

    def follows(self) -> tuple[Consequence, ...]:
        """The end of all that ran there."""
        return (Ends(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The platform's word on the machines, and the ends of all processes."""
        return machines_ended(occurrence, events, signal.SIGKILL)
