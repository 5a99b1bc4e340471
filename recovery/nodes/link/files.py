"""Copies files of a node's processes to the run's directory: what an agent sends of them, and where
it is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from trainchaos.chaos.errors import ScenarioError
from trainchaos.recovery.nodes.link.link import Lazy
from trainchaos.recovery.nodes.link.protocol import Lines
from trainchaos.recovery.transport.stream import MessageError

CHUNK = 1 << 16
LOCK = "supervisor.lock"
"""The supervisor's lock file in the directory of its job's files
(``recovery.cli.takeover_log``).
"""
_ENCODING = "latin-1"  # one character per byte: all output of a process arrives unchanged


def refuse_shared(scratch: Path) -> None:
    """Raise ScenarioError where a job's files come to this directory too: an agent deletes its own
    files once they have arrived, and these would be the same.
    """
    if (scratch / LOCK).exists():
        raise ScenarioError(
            f"{scratch} is where a supervisor keeps the event logs of a job (--events): the agent"
            " would delete them",
            hint="name another --scratch, or none",
        )


class FileTail:
    """One growing file. ``name``: as in ``Lines.file``; ``whole_lines``: send no part of a line."""

    def __init__(self, path: Path, name: str, *, whole_lines: bool) -> None:
        self.path = path
        self._name = name
        self._whole_lines = whole_lines
        self._offset = 0

    def new(self, *, last: bool = False) -> Iterator[Lazy]:
        """New content, in pieces that are read when they are sent. ``last``: nothing more will be
        added.
        """
        try:
            size = self.path.stat().st_size
            end = self._end_of_lines(size) if self._whole_lines and not last else size
        except OSError:
            return  # the file does not exist yet
        while self._offset < end:
            length = min(CHUNK, end - self._offset)
            yield partial(_read, self.path, self._name, self._offset, length)
            self._offset += length

    def _end_of_lines(self, size: int) -> int:
        """Offset after the last newline; lines are short compared to CHUNK."""
        start = max(self._offset, size - CHUNK)
        if start >= size:
            return self._offset
        with open(self.path, "rb") as stream:
            found = os.pread(stream.fileno(), size - start, start).rfind(b"\n")
        return start + found + 1 if found >= 0 else self._offset


def _read(path: Path, name: str, offset: int, length: int) -> Lines:
    try:
        with open(path, "rb") as stream:
            data = os.pread(stream.fileno(), length, offset)
    except OSError:
        data = b""  # removed by another program: the sequence numbers in the log show it
    return Lines(file=name, offset=offset, text=data.decode(_ENCODING))


def land(directory: Path, lines: Lines) -> None:
    """Write bytes at their offset; writing them twice changes nothing. Raises MessageError for
    a place outside of ``directory``, OSError.
    """
    path = PurePosixPath(lines.file)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise MessageError(f"a file outside of the run's directory: {lines.file!r}")
    target = directory / path
    target.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        at = lines.offset
        try:
            data = lines.text.encode(_ENCODING)
        except UnicodeEncodeError as error:
            raise MessageError(f"bytes of {lines.file!r} that are none") from error
        # After a gap nothing is written: the file stays a prefix of what the process wrote, and
        # shows that it is one.
        while data and at <= os.fstat(fd).st_size:
            written = os.pwrite(fd, data, at)
            data, at = data[written:], at + written
    finally:
        os.close(fd)
