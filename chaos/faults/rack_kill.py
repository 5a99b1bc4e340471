"""A rack is lost: nodes that fail together."""

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
    """All nodes of a rack end at once: a lost power feed or switch, the correlated failure that
    spares in the same rack do not help against. Real, as node-kill.

    ``launcher.nodes_per_rack`` says which nodes share a rack. One incident. Landed: as node-kill,
    by the platform's word on its machines or the kernel's on the processes.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})
    whole_racks: ClassVar[bool] = True

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Kill them."""
        return target.kill()

    def follows(self) -> tuple[Consequence, ...]:
        """The end of all that ran there."""
        return (Ends(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The platform's word on the machines, and the ends of all processes."""
        return machines_ended(occurrence, events, signal.SIGKILL)
