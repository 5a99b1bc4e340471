"""Kills all nodes of a rack together."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events.log import Event
from chaos.fault.aftermath import Consequence, Ends
from chaos.fault.base import Fault, Landed, Need, Occurrence, Where
from chaos.fault.targets import NodeTarget
from chaos.fault.witness import machines_ended


class RackKill(Fault):
    """All nodes of a rack die at once: a lost power feed or switch, a correlated failure against
    which spares in the same rack do not help. Real, as node-kill.

    ``launcher.nodes_per_rack`` says which nodes share a rack. It counts as one incident. Landed: as
    node-kill, by the platform's report on the machines or the kernel's on the processes.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})
    whole_racks: ClassVar[bool] = True

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Kill the nodes."""
        return target.kill()

    def follows(self) -> tuple[Consequence, ...]:
        """All their processes end."""
        return (Ends(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The platform's report on the machines, and the exits of all processes."""
        return machines_ended(occurrence, events, signal.SIGKILL)
