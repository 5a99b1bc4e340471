"""Reaps orphans of an agent's processes, which become children of the agent."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

from trainchaos.recovery.process import processes

EVERY_S = 2.0


class Strays:
    """Orphans, which become children of this process and which no other part waits for."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._due_s = 0.0

    def reap(self, now_s: float, ours: Collection[int]) -> None:
        """Now and again. ``ours``: children that others wait for. A child that is seen ended twice
        is an orphan.
        """
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S
        me = str(os.getpid())
        ended = {
            pid
            for pid, fields in processes.everybody()
            if fields[:2] == ["Z", me] and pid not in ours
        }
        for pid in ended & self._seen:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        self._seen = ended
