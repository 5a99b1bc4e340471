"""A rack is lost: nodes that fail together."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events import Event
from chaos.fault import Fault, Landed, Need, Occurrence, Where
from chaos.targets import NodeTarget
from chaos.witness import all_exited


class RackKill(Fault):
    """SIGKILL to all processes of all nodes of a rack at once: a lost power feed or switch, the correlated failure
    that spares in the same rack do not help against. The deaths are real, as those of node-kill.

    ``launcher.nodes_per_rack`` says which nodes share a rack. One incident. Landed: the kernel reports that each of
    its processes ended by that signal, which no supervisor had sent before.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})
    whole_racks: ClassVar[bool] = True

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Kill them."""
        for process in target.processes:
            process.signal(signal.SIGKILL)
        return {"signal": "SIGKILL", "processes": len(target.processes)}

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit statuses of all."""
        return all_exited(occurrence, events, signal.SIGKILL)
