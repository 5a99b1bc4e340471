"""Finds what a command leaves behind when it ends: processes that live on, and shared memory that
no process uses any more.

Only what is known to be the command's counts. Its processes are those below its guard, in any
session: the guard collects what detaches. A file in /dev/shm, or a System V segment, that was not
there before is the command's when one of its processes was seen to have it open or mapped, or made
it, or gave it its number; other programs make such files too.
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

from harness.host import processes
from harness.script.processes import tree
from harness.script.processes.tree import ProcessRow

SHM = Path("/dev/shm")
SEGMENTS = Path("/proc/sysvipc/shm")
LINGER_S = 5.0  # so long a process may take to end after its command
LOOK_S = 0.05
TRIES = 10  # looks for whose a new file is
SEGMENT = "segment "
OF_COMMAND = "the command"
"""Whose it is, where it is no rank's."""
_IPC_RMID = 0
_SESSION = 3
NameOf = Callable[[int], str | None]
"""pid -> the rank that it is, if it is one."""


@dataclass(kw_only=True)
class _Found:
    """A new file or segment. ``by``: processes of the command that were seen to have it; ``tries``:
    looks without an answer.
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
        """Take note of what is new, and who of the processes below ``root`` has it. Cheap where
        nothing is.
        """
        ids = self._ids()
        for new in (*self._names(), *ids):
            if new not in self._before:
                self._found.setdefault(new, _Found())
        wanted = {name for name, one in self._found.items() if not one.by and one.tries < TRIES}
        if not wanted:
            return
        rows = tree.below(root)
        held = {pid: self._held(pid) for pid in rows} if wanted - ids.keys() else {}
        for name in wanted:
            one = self._found[name]
            one.tries += 1
            holders = {pid for pid, names in held.items() if name in names}
            holders |= {ids.get(name, 0), *map(int, re.findall(r"[0-9]{2,9}", name))} & rows.keys()
            one.by |= {_owner(pid, rows, name_of) for pid in holders}

    def processes(self, root: int, session: int) -> list[dict[str, Any]]:
        """Those that live on although their command has ended well; they have a moment. One that is
        stopped does not count: that was done to it. ``session``: the command's.
        """
        deadline = time.monotonic() + LINGER_S
        while True:
            rows = [row for row in tree.below(root).values() if row.state not in "Tt"]
            if not rows or time.monotonic() > deadline:
                break
            time.sleep(LOOK_S)
        return [
            {"pid": row.pid, "name": row.name, "detached": _session(row.pid) != session}
            for row in rows
        ]

    def memory(self) -> list[dict[str, Any]]:
        """Shared memory of the command that is still there and that no living process has; it is
        removed.
        """
        kept = [name for name, one in self._found.items() if one.by]
        paths = [self._shm / name for name in kept if (self._shm / name).exists()]
        left = {path.name for path in processes.unheld(paths)}
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

    def _held(self, pid: int) -> set[str]:
        """Names of the files there that a process has open or mapped."""
        found = set()
        try:
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if f" {self._shm}/" in line:
                    found.add(line.split(maxsplit=5)[-1])
            for entry in os.scandir(f"/proc/{pid}/fd"):
                found.add(os.readlink(entry.path))
        except OSError:  # it is gone, or was in between
            pass
        return {
            path[len(str(self._shm)) + 1 :] for path in found if path.startswith(f"{self._shm}/")
        }


def _owner(pid: int, rows: Mapping[int, ProcessRow], name_of: NameOf) -> str:
    """The rank that a process is, or is below."""
    while pid in rows:
        if name := name_of(pid):
            return name
        pid = rows[pid].parent
    return OF_COMMAND


def _session(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(text[text.rfind(")") + 2 :].split()[_SESSION])
