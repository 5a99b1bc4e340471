"""Finds what a command leaves behind when it ends: processes that outlive it, and shared memory
that is no longer used.

Counts only what is known to belong to the command. Its processes are those below its guard, in any
session: the guard adopts detached ones. A new file in /dev/shm is the command's if one of its
processes had it open or mapped, or has its pid in the file's name; other programs make such files
too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainchaos.harness.host import shared_memory
from trainchaos.harness.host.shared_memory import SHM
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.tree import ProcessRow

LINGER_S = 5.0  # how long a process may outlive its command
LOOK_S = 0.05
TRIES = 10  # attempts to find the owner of a new file
OF_COMMAND = "the command"
"""Owner of what belongs to no rank."""
NameOf = Callable[[int], str | None]
"""pid -> the rank that it is, if it is one."""


@dataclass(kw_only=True)
class _New:
    """A new file. ``by``: processes of the command that had it; ``tries``: looks for an owner."""

    by: set[str] = field(default_factory=set)
    tries: int = 0


class CommandLeftovers:
    """The leftovers of one arm. ``shm``: where shared memory lies."""

    def __init__(self, shm: Path = SHM) -> None:
        self._shm = shm
        self._before = self._names()
        self._new: dict[str, _New] = {}

    def look(self, root: int, name_of: NameOf) -> None:
        """Record new files, and which processes below ``root`` have them. Cheap if nothing is
        new.
        """
        for name in self._names() - self._before:
            self._new.setdefault(name, _New())
        wanted = {name for name, new in self._new.items() if not new.by and new.tries < TRIES}
        if not wanted:
            return
        rows = tree.below(root)
        held = {pid: shared_memory.held_by(pid, self._shm) for pid in rows}
        for name in wanted:
            new, file = self._new[name], shared_memory.inode_of(self._shm / name)
            holders = {pid for pid, files in held.items() if file in files}
            holders |= {*map(int, re.findall(r"[0-9]{2,9}", name))} & rows.keys()
            new.by |= {_owner(pid, rows, name_of) for pid in holders}
            new.tries += 1

    def processes(self, root: int, session: int, *, well: bool = True) -> list[dict[str, Any]]:
        """Processes that outlive a command: after a grace period where it ended ``well``, else at
        once, as it may be started again. Stopped ones do not count: a fault stopped them.
        ``session``: the command's.
        """
        deadline = time.monotonic() + (LINGER_S if well else 0.0)
        while True:
            rows = [row for row in tree.below(root).values() if row.state not in "Tt"]
            if not rows or time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
        return [
            {"pid": row.pid, "name": row.name, "detached": row.session != session} for row in rows
        ]

    def memory(self) -> list[dict[str, Any]]:
        """Remove shared memory of the command that no living process uses; returns what was
        there.
        """
        kept = [self._shm / name for name, new in self._new.items() if new.by]
        left = shared_memory.unheld([path for path in kept if path.exists()], self._shm)
        for path in left:
            path.unlink(missing_ok=True)
        return [{"name": path.name, "held_by": sorted(self._new[path.name].by)} for path in left]

    def _names(self) -> set[str]:
        try:
            return {*os.listdir(self._shm)}
        except OSError:
            return set()


def _owner(pid: int, rows: Mapping[int, ProcessRow], name_of: NameOf) -> str:
    """The rank that a process is, or is below."""
    while pid in rows:
        if name := name_of(pid):
            return name
        pid = rows[pid].parent
    return OF_COMMAND
