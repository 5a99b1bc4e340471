"""Keeps the event logs and outputs of a job within a limit, and counts what it drops for that.

Files of processes that are gone are deleted, the oldest first. From files that somebody still writes to the beginning
is taken away: the file system gives back the room of their first bytes, and neither size nor offsets change, so that
nobody who writes to them, forwards or completes them has to know. The supervisor's own log, which grows with failures
and not with steps, is left alone: another supervisor may have to go on from it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chaos.events import ORCHESTRATOR

EVERY_S = 10.0
LEAVE = 0.8  # of the limit is filled after a clearing
SUFFIXES = (".jsonl", ".log")
BLOCK = 1 << 16  # a multiple of any file system's block
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2  # include/uapi/linux/falloc.h


@dataclass(frozen=True, kw_only=True)
class Cleared:
    """What was dropped: names of files, and bytes of all of them; ``cut``: of those whose beginning alone went."""

    files: tuple[str, ...]
    bytes: int
    cut: int


@dataclass(frozen=True, kw_only=True)
class _File:
    path: Path
    held: int  # bytes on the disk
    size: int
    changed_ns: int

    @property
    def actor(self) -> str:
        return self.path.name.split(".", 1)[0]


class LogRoom:
    """Of the files directly in ``folders``. ``limit_bytes``: for all of them together."""

    def __init__(self, folders: Sequence[Path], limit_bytes: int) -> None:
        self._folders = folders
        self._limit = limit_bytes
        self._due_s = 0.0

    def look(self, living: Collection[str]) -> Cleared | None:
        """Make room, if it is time to look and too much is there. ``living``: processes that may write still."""
        if time.monotonic() < self._due_s:
            return None
        self._due_s = time.monotonic() + EVERY_S
        files = self._files()
        excess = sum(file.held for file in files) - self._limit
        return self._clear(files, living, excess + int((1 - LEAVE) * self._limit)) if excess > 0 else None

    def _clear(self, files: list[_File], living: Collection[str], wanted: int) -> Cleared | None:
        dropped: list[str] = []
        freed = 0
        for file in sorted(files, key=lambda file: file.changed_ns):
            if freed < wanted and file.actor not in living and file.actor != ORCHESTRATOR:
                with suppress(OSError):
                    file.path.unlink()
                    dropped.append(file.path.name)
                    freed += file.held
        cut = 0
        for file in sorted(files, key=lambda file: -file.held):
            if freed + cut < wanted and file.actor in living:
                cut += (got := _cut(file, wanted - freed - cut))
                dropped += [file.path.name] if got else []
        return Cleared(files=tuple(dropped), bytes=freed + cut, cut=cut) if dropped else None

    def _files(self) -> list[_File]:
        found = []
        for folder in self._folders:
            with suppress(OSError):
                found += [
                    _File(path=Path(e.path), held=s.st_blocks * 512, size=s.st_size, changed_ns=s.st_mtime_ns)
                    for e in os.scandir(folder)
                    if e.name.endswith(SUFFIXES) and e.is_file(follow_symlinks=False) and (s := e.stat())
                ]
        return found


def _cut(file: _File, wanted: int) -> int:
    """Drop so many bytes at the beginning of what a file holds, at most three quarters; how many it is."""
    hole = max(0, file.size - file.held)
    length = (hole + min(wanted + BLOCK, file.held * 3 // 4)) // BLOCK * BLOCK
    with suppress(OSError):
        fd = os.open(file.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if length > 0 and _punch(fd, length):
                return max(0, file.held - os.fstat(fd).st_blocks * 512)
        finally:
            os.close(fd)
    return 0


def _punch(fd: int, length: int) -> bool:
    """Give back the room of a file's first bytes, which are zeros from then on; whether it worked."""
    with suppress(AttributeError):  # another C library
        call = ctypes.CDLL(None).fallocate
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        return bool(call(fd, _KEEP_SIZE | _PUNCH_HOLE, 0, length) == 0)
    return False
