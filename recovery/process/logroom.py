"""Keeps the event logs and outputs of a job within a size limit, and counts what it drops.

Files of processes that have exited are deleted, the oldest first. Files still being written lose
their beginning: the file system frees the space of their first bytes, while size and offsets stay
the same, so that their writers and readers notice nothing. The supervisor's own log, which grows
with failures and not with steps, is left alone: another supervisor may have to take over from it.

The folders may hold other files, for example one that the user chose for the output of ranks: files
that were there before the job, or are not named like a process of it, are neither counted nor
touched.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.events.log import ORCHESTRATOR

EVERY_S = 10.0
LEAVE = 0.8  # share of the limit that is filled after a clearing
SUFFIXES = (".jsonl", ".log", ".stacks")
BLOCK = 1 << 16  # a multiple of any file system's block
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2  # include/uapi/linux/falloc.h


@dataclass(frozen=True, kw_only=True)
class DroppedLogs:
    """What was dropped: names of files, and bytes in total; ``cut``: files of which only the
    beginning went.
    """

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
        return _actor(self.path)


class LogRoom:
    """Limits the files directly in ``folders`` that processes of this job write. ``limit_bytes``:
    for all of them together; ``before``: names of processes that an earlier supervisor of the job
    has started; None: there was none, and no file of this job exists yet, not even its supervisor's
    log.
    """

    def __init__(
        self, folders: Sequence[Path], limit_bytes: int, before: Collection[str] | None = None
    ) -> None:
        self._folders = folders
        self._limit = limit_bytes
        self._due_s = 0.0
        self._names = {ORCHESTRATOR, *(before or ())}
        known = self._names if before is not None else set()
        self._foreign = frozenset(path for path, _ in self._there() if _actor(path) not in known)

    def begins(self, name: str) -> None:
        """A process of this name is about to be started."""
        self._names.add(name)

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._due_s

    def look(self, living: Collection[str]) -> DroppedLogs | None:
        """Make room, if a check is due and the limit is exceeded. ``living``: processes that may
        still write.
        """
        if not self.due:
            return None
        self._due_s = time.monotonic() + EVERY_S
        # one at a time: there may be many
        excess = sum(file.held for file in self._files()) - self._limit
        if excess <= 0:
            return None
        return self._clear(list(self._files()), living, excess + int((1 - LEAVE) * self._limit))

    def _clear(
        self, files: list[_File], living: Collection[str], wanted: int
    ) -> DroppedLogs | None:
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
        return DroppedLogs(files=tuple(dropped), bytes=freed + cut, cut=cut) if dropped else None

    def _files(self) -> Iterator[_File]:
        """The log and output files of this job."""
        for path, s in self._there():
            if path not in self._foreign and _actor(path) in self._names:
                yield _File(
                    path=path, held=s.st_blocks * 512, size=s.st_size, changed_ns=s.st_mtime_ns
                )

    def _there(self) -> Iterator[tuple[Path, os.stat_result]]:
        for folder in dict.fromkeys(self._folders):
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIXES) and entry.is_file(follow_symlinks=False):
                        # it was deleted meanwhile; the other files remain
                        with suppress(FileNotFoundError):
                            yield Path(entry.path), entry.stat(follow_symlinks=False)


def _actor(path: Path) -> str:
    """The process that writes to the file."""
    return path.name.removesuffix(path.suffix)


def _cut(file: _File, wanted: int) -> int:
    """Drop that many bytes at the beginning of a file's data, at most three quarters; returns the
    number dropped.
    """
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
    """Free the space of a file's first bytes, which read as zeros from then on; returns whether it
    worked.
    """
    with suppress(AttributeError):  # another C library
        call = ctypes.CDLL(None).fallocate
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        return bool(call(fd, _KEEP_SIZE | _PUNCH_HOLE, 0, length) == 0)
    return False
