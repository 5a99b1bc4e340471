"""Finds the ranks of a command whose processes nothing names: neither their environments nor their
reports, as where ``torch.multiprocessing.spawn`` or Ray starts them.

They are processes that one parent has started alike, as many as there are ranks, each with network
connections of its own, as ranks have that meet each other: the workers of a data loader have none,
or share those of their parent. Of several such groups the one that has worked most. Who came first
is rank 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from trainchaos.harness.script.processes import tree
from trainchaos.harness.script.processes.tree import PLUMBING, FoundRank, ProcessRow

LEAST = 2
_ESTABLISHED = "01"
_TITLE = 15  # characters of a title that the kernel keeps as the name


class Alike:
    """Finds them, and keeps the number of each for as long as it lives."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}
        self._form = ""

    def of(
        self, rows: Mapping[int, ProcessRow], count: int, *, settled: bool
    ) -> dict[int, FoundRank]:
        """Rank -> its process; those that are left where some have ended. ``settled``: steps are
        reported, so that all are there and have worked.
        """
        living = {(row.pid, row.started) for row in rows.values()}
        known = {key: rank for key, rank in self._known.items() if key in living}
        if len(known) < count and settled:
            group, _ = busiest(rows, count, self._form)
            keys = [(row.pid, row.started) for row in group]
            if group:
                self._form = _form(group[0])
                known = {key: rank for key, rank in known.items() if key in keys}
                free = (rank for rank in range(count) if rank not in known.values())
                known |= {key: next(free) for key in keys if key not in known}
        self._known = known
        return {
            rank: FoundRank(rank=rank, world=None, pid=pid, started=at, top=pid, sure=False)
            for (pid, at), rank in known.items()
        }


def busiest(
    rows: Mapping[int, ProcessRow], count: int | None = None, form: str = ""
) -> tuple[list[ProcessRow], int]:
    """The group that has worked most, oldest first, and its ticks of processor time. ``count``: how
    many they are, ``form``: of what form, if that is known.
    """
    groups: dict[tuple[int, str], list[ProcessRow]] = {}
    for row in rows.values():
        if row.name not in PLUMBING:
            groups.setdefault((row.parent, _form(row)), []).append(row)
    best: tuple[list[ProcessRow], int] = ([], 0)
    for (parent, its), group in groups.items():
        if len(group) < LEAST or count not in (None, len(group)) or form not in ("", its):
            continue
        ticks = sum(row.ticks for row in group)
        shared = _connections(parent)
        if ticks > best[1] and all(_connections(row.pid) - shared for row in group):
            best = sorted(group, key=lambda row: (row.started, row.pid)), ticks
    return best


def _form(row: ProcessRow) -> str:
    """Its command line without numbers, or the title that it has given itself."""
    words = tree.command_line(row.pid).rstrip("\0")
    title = "\0" not in words and words.startswith(row.name)
    return words[:_TITLE] if title else re.sub(r"\d+", "#", words)


def _connections(pid: int) -> set[str]:
    """Its TCP connections, by the numbers that the kernel gives to sockets."""
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return set()
    sockets = {link[8:-1] for link in links if link.startswith("socket:[")}
    found: set[str] = set()
    for table in ("tcp", "tcp6") if sockets else ():
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        found |= {row[9] for line in lines if (row := line.split())[3] == _ESTABLISHED}
    return sockets & found
