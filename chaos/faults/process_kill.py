"""Kills a process."""

from __future__ import annotations

from trainchaos.chaos.faults._kill import KillsProcess


class ProcessKill(KillsProcess):
    """SIGKILL through the held pidfd: an out-of-memory kill, a lost host, a crashed runtime. Real.

    Landed: the kernel reports the process ended by that signal, and its supervisor had not sent it.
    """
