"""Finds what a command leaves behind when it ends: processes that outlive it, and shared memory
that is no longer used.

Counts only what is known to belong to the command. Its processes are those below its guard, in any
session: the guard adopts detached ones. A new file in /dev/shm, or System V segment, is the
command's if one of its processes had it open or mapped, made it, or has its pid in the file's name;
other programs make such files too.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainchaos.harness.host import shared_memory
from trainchaos.harness.host.shared_memory import SHM, Inode
from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.tree import ProcessRow

SEGMENTS = Path("/proc/sysvipc/shm")
LINGER_S = 5.0  # how long a process may outlive its command
LOOK_S = 0.05
TRIES = 10  # attempts to find the owner of a new file
SEGMENT = "segment "
OF_COMMAND = "the command"
"""Owner of what belongs to no rank."""
_IPC_RMID = 0
NameOf = Callable[[int], str | None]
"""pid -> the rank that it is, if it is one."""


@dataclass(kw_only=True)
class _Found:
    """A new file or segment. ``by``: processes of the command that had it; ``tries``: looks that
    found no owner.
    """

    by: set[str] = field(default_factory=set)
    tries: int = 0


class CommandLeftovers:
    """The leftovers of one arm. ``shm``, ``segments``: where shared memory is listed."""

    def __init__(self, shm: Path = SHM, segments: Path = SEGMENTS) -> None:
        self._shm, self._segments = shm, segments
        self._before = set(self._names()) | set(self._ids())
        self._found: dict[str, _Found] = {}

    def look(self, root: int, name_of: NameOf) -> None:
        """Record new files and segments, and which processes below ``root`` have them. Cheap if
        nothing is new.
        """
        ids = self._ids()
        for new in (*self._names(), *ids):
            if new not in self._before:
                self._found.setdefault(new, _Found())
        wanted = {name for name, one in self._found.items() if not one.by and one.tries < TRIES}
        if not wanted:
            return
        rows = tree.below(root)
        held: dict[int, set[Inode]] = {}
        if wanted - ids.keys():
            held = {pid: shared_memory.held_by(pid, self._shm) for pid in rows}
        for name in wanted:
            one = self._found[name]
            one.tries += 1
            file = shared_memory.inode_of(self._shm / name)
            holders = {pid for pid, files in held.items() if file in files}
            holders |= {ids.get(name, 0), *map(int, re.findall(r"[0-9]{2,9}", name))} & rows.keys()
            one.by |= {_owner(pid, rows, name_of) for pid in holders}

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
        kept = [name for name, one in self._found.items() if one.by]
        paths = [self._shm / name for name in kept if (self._shm / name).exists()]
        left = {path.name for path in shared_memory.unheld(paths, self._shm)}
        segments = self._ids(unused=True)
        found = []
        for name in kept:
            if name in left or name in segments:
                found.append({"name": name, "held_by": sorted(self._found[name].by)})
                self._remove(name)
        return found

    def _remove(self, name: str) -> None:
        if name.startswith(SEGMENT):
            ctypes.CDLL(None).shmctl(int(name.removeprefix(SEGMENT)), _IPC_RMID, None)
        else:
            (self._shm / name).unlink(missing_ok=True)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._shm)
        except OSError:
            return []

    def _ids(self, *, unused: bool = False) -> dict[str, int]:
        """System V segments -> the process that made each. ``unused``: only segments that no
        process has attached.
        """
        try:
            head, *lines = self._segments.read_text().splitlines()
        except (OSError, ValueError):
            return {}
        columns = head.split()
        rows = [dict(zip(columns, line.split(), strict=False)) for line in lines]
        return {
            f"{SEGMENT}{row['shmid']}": int(row["cpid"])
            for row in rows
            if {"shmid", "cpid", "nattch"} <= row.keys() and not (unused and int(row["nattch"]))
        }


def _owner(pid: int, rows: Mapping[int, ProcessRow], name_of: NameOf) -> str:
    """The rank that a process is, or is below."""
    while pid in rows:
        if name := name_of(pid):
            return name
        pid = rows[pid].parent
    return OF_COMMAND
