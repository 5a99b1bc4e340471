"""Kills a node with everything on it."""

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
    """The node dies at once with everything on it, as on power loss or a kernel panic. Real: its
    machine (a container) is killed; where nodes are only names (the local launcher), all its
    processes are.

    It counts as one incident, however many processes die. Where machines can be restarted, this one
    is, as if it were replaced. Landed: the platform reports that the machine ended; without
    machines, the kernel reports that each process of the node ended by a SIGKILL that no supervisor
    had sent.
    """

    where: ClassVar[Where] = Where.NODE
    needs: ClassVar[frozenset[Need]] = frozenset({Need.NODES})

    def act(self, target: NodeTarget) -> Mapping[str, Any]:
        """Kill the node."""
        return target.kill()

    def follows(self) -> tuple[Consequence, ...]:
        """All its processes end."""
        return (Ends(),)

    def landed(self, occurrence: Occurrence, events: Sequence[Event]) -> Landed | None:
        """The platform's report on the machines, and the exits of all processes."""
        return machines_ended(occurrence, events, signal.SIGKILL)
