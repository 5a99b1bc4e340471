"""Finds the training process of a command of one rank: the command itself, or one that it started.

A process that reports through its beacon needs no search. For a command that prints its progress, a
process that has written less than was printed is a launcher: of the processes it started, the one
that has written most trains. A process that has written enough may still forward the output of
another program through a pipe; then that program uses at least half as much processor time. Other
children (a tracker, the workers of a data loader) neither print nor compute so much.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainchaos.harness.script.processes.tree import PLUMBING, ProcessRow, command_line, is_helper


@dataclass(frozen=True, kw_only=True)
class ProcessWork:
    """Work of a process and all its descendants. ``written``: bytes, including files; ``ticks``: of
    processor time.
    """

    written: int
    ticks: int


class Trainer:
    """Finds the training process once and keeps it; after it has ended, finds the next one of its
    launcher.
    """

    def __init__(self) -> None:
        self._chosen: ProcessRow | None = None
        self._launchers: set[tuple[int, int]] = set()

    def of(
        self, top: int, rows: Mapping[int, ProcessRow], printed: int, *, settled: bool
    ) -> int | None:
        """The training process, ``top`` or a descendant; None while a launcher has none.
        ``printed``: bytes of output so far; ``settled``: steps are reported, so keep the process
        found now.
        """
        known = self._chosen
        if known is not None and known.pid in rows and rows[known.pid].started == known.started:
            return known.pid
        pid, path = top, []
        while True:
            row = rows[pid]
            launches = (row.pid, row.started) in self._launchers
            child = _below(row, rows, printed, launches=launches)
            if child is None:
                break
            path.append((row.pid, row.started))
            pid = child
        if launches:
            return None
        if settled:
            self._chosen = rows[pid]
            self._launchers.update(path)
        return pid


def _below(
    row: ProcessRow, rows: Mapping[int, ProcessRow], printed: int, *, launches: bool
) -> int | None:
    """The child that trains in place of a process; None if the process itself trains, or if a
    launcher has no training child.
    """
    children = [
        child for child in rows.values() if child.parent == row.pid and child.name not in PLUMBING
    ]
    work = {child.pid: _all_work(child.pid, rows) for child in children}
    own = _work(row.pid)
    if not children or own is None:
        return None
    most = max(work, key=lambda pid: (work[pid].written, work[pid].ticks, -pid))
    if launches:
        return most if work[most].written else None
    busy = 2 * work[most].ticks >= own.ticks
    if own.written < printed:
        return most if busy and work[most].written > own.written else None
    for pid in sorted(work, key=lambda pid: -work[pid].written):
        if 2 * work[pid].ticks >= own.ticks and _passes_on(row.pid, pid):
            return pid
    return None


def _passes_on(reader: int, writer: int) -> bool:
    """Whether a process forwards another program's output."""
    pipe = _link(f"/proc/{writer}/fd/1")
    if (
        not pipe.startswith("pipe:")
        or is_helper(writer)
        or command_line(reader) == command_line(writer)
    ):
        return False
    try:
        held = os.listdir(f"/proc/{reader}/fd")
    except OSError:
        return False
    return any(_link(f"/proc/{reader}/fd/{fd}") == pipe and _readable(reader, fd) for fd in held)


def _readable(pid: int, fd: str) -> bool:
    try:
        return bool(os.lstat(f"/proc/{pid}/fd/{fd}").st_mode & stat.S_IRUSR)
    except OSError:
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _all_work(top: int, rows: Mapping[int, ProcessRow]) -> ProcessWork:
    """Work of a process and its descendants, as far as it is readable."""
    found, waiting = [], [top]
    while waiting:
        pid = waiting.pop()
        found.append(_work(pid) or ProcessWork(written=0, ticks=0))
        waiting += [row.pid for row in rows.values() if row.parent == pid]
    return ProcessWork(
        written=sum(one.written for one in found), ticks=sum(one.ticks for one in found)
    )


def _work(pid: int) -> ProcessWork | None:
    """Work of one process; None if it is gone or belongs to another user."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    written = next((int(line.split()[1]) for line in lines if line.startswith("wchar")), 0)
    return ProcessWork(written=written, ticks=int(fields[11]) + int(fields[12]))
