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
from pathlib import Path

from trainchaos.harness.script.processes.tree import PLUMBING, ProcessRow, command_line, is_helper


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
    own = _written(row.pid)
    if not children or own is None:
        return None
    work = {child.pid: _work(child.pid, rows) for child in children}
    most = max(work, key=lambda pid: (*work[pid], -pid))
    written, ticks = work[most]
    if launches:
        return most if written else None
    if own < printed:
        return most if 2 * ticks >= row.ticks and written > own else None
    busy = (pid for pid in sorted(work, key=lambda p: -work[p][0]) if 2 * work[pid][1] >= row.ticks)
    return next((pid for pid in busy if _passes_on(row.pid, pid)), None)


def _passes_on(reader: int, writer: int) -> bool:
    """Whether a process forwards another program's output."""
    pipe = _link(f"/proc/{writer}/fd/1")
    another = not is_helper(writer) and command_line(reader) != command_line(writer)
    if not (pipe.startswith("pipe:") and another):
        return False
    try:
        held = [f"/proc/{reader}/fd/{fd}" for fd in os.listdir(f"/proc/{reader}/fd")]
        return any(_link(fd) == pipe and os.lstat(fd).st_mode & stat.S_IRUSR for fd in held)
    except OSError:
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _work(top: int, rows: Mapping[int, ProcessRow]) -> tuple[int, int]:
    """Bytes that a process and its descendants have written, and ticks of processor time."""
    written, ticks = _written(top) or 0, rows[top].ticks
    for row in rows.values():
        if row.parent == top:
            more = _work(row.pid, rows)
            written, ticks = written + more[0], ticks + more[1]
    return written, ticks


def _written(pid: int) -> int | None:
    """Bytes, including files; None if the process is gone or belongs to another user."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar")), 0)
