"""Kills all nodes of a rack together."""

from __future__ import annotations

from typing import ClassVar

from trainchaos.chaos.faults._kill import KillsNodes


class RackKill(KillsNodes):
    """All nodes of a rack die at once: a lost power feed or switch, a correlated failure against
    which spares in the same rack do not help. Real, as node-kill.

    ``launcher.nodes_per_rack`` says which nodes share a rack. It counts as one incident. Landed: as
    node-kill, by the platform's report on the machines or the kernel's on the processes.
    """

    whole_racks: ClassVar[bool] = True
