"""A node is lost with everything on it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from chaos.events import Event
from chaos.fault import Fault, Landed, Need, Occurrence, Where
from chaos.targets import NodeTarget
from chaos.witness import all_exited


class NodeKill(Fault):
    """SIGKILL to all processes of a node within about a millisecond: power loss, a kernel panic. The deaths are real;
    where nodes are only names (the local launcher) the machine itself stays.

    One incident, however many processes. Replacements may come to the node again: it is thought of as replaced.
    Landed: the kernel reports that each of its processes ended by that signal, which no supervisor had sent before.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Kill them."""
        for process in target.processes:
            process.signal(signal.SIGKILL)
        return {"signal": "SIGKILL", "processes": len(target.processes)}

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The reaped exit statuses of all."""
        return all_exited(occurrence, events, signal.SIGKILL)
