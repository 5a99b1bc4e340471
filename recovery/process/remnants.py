"""Ends processes left in the sessions of exited processes, such as workers of a data loader.

A rank leads a session of its own. The kernel does not reuse the number of a session while it has
members, and may do so as soon as it has none; a late check must not take another program's session
for one of ours. So each session is checked soon after its leader has ended, and forgotten once it
is empty.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from trainchaos.recovery.process import processes

LOOK_AFTER_S = 2.0  # a check reads all of /proc: not while the job recovers


class LeftoverSessions:
    """Sessions of leaders that were children of this process. ``ended``: those that may still have
    members.
    """

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}
        self._due_s = 0.0

    def add(self, leader: int) -> None:
        """Add a session whose leader has just been reaped."""
        if not self.ended:
            self._due_s = time.monotonic() + LOOK_AFTER_S
        self.ended[leader] = time.clock_gettime(time.CLOCK_BOOTTIME)

    def look(self) -> None:
        """Kill what is left, and reap what has become a child of ours; every LOOK_AFTER_S, and
        without waiting.
        """
        if not self.ended or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_AFTER_S
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        found: dict[int, list[tuple[int, list[str]]]] = {}
        for pid, fields in processes.everybody():
            if int(fields[3]) in self.ended:
                found.setdefault(int(fields[3]), []).append((pid, fields))
        for session, ended_s in list(self.ended.items()):
            members = found.get(session, [])
            # All members are younger than the leader's end: the session was empty, and this is
            # another one with the same number.
            if not any(int(fields[19]) * tick_s <= ended_s for _, fields in members):
                del self.ended[session]
                continue
            for pid, fields in members:
                _end(pid, session, zombie_of_ours=fields[:2] == ["Z", str(os.getpid())])


def _end(pid: int, session: int, *, zombie_of_ours: bool) -> None:
    with suppress(OSError):  # it has exited meanwhile
        fd = os.pidfd_open(pid)
        try:
            now = processes.stat_of(pid)  # read only once the descriptor pins the process
            if not now or int(now[3]) != session:
                return
            if zombie_of_ours:
                os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG)
            else:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
