"""Kills a node with everything on it."""

from __future__ import annotations

from trainchaos.chaos.faults._kill import KillsNodes


class NodeKill(KillsNodes):
    """The node dies at once with everything on it, as on power loss or a kernel panic. Real: its
    machine (a container) is killed; where nodes are only names (the local launcher), all its
    processes are.

    It counts as one incident, however many processes die. Where machines can be restarted, this one
    is, as if it were replaced. Landed: the platform reports that the machine ended; without
    machines, the kernel reports that each process of the node ended by a SIGKILL that no supervisor
    had sent; those that were ending of an error of their own do not count.
    """
