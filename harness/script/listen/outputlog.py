"""Keeps a command's output log small: its beginning and end stay, and the space between is freed.

The command writes to the file itself, so the file cannot be cut while the command lives. Instead,
the part already read is punched out, which keeps the file's length; at the end the hole is closed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

KEPT_HEAD = 4 << 20  # bytes
KEPT_TAIL = 4 << 20  # bytes
CUT_AT_ONCE = 1 << 20  # bytes
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02


class OutputLog:
    """The log of one arm's command."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hole_end = KEPT_HEAD
        self._refused = False

    def cut(self, taken: int) -> None:
        """Free the space between beginning and end; ``taken``: bytes read, beyond which nothing is
        freed.
        """
        end = taken - KEPT_TAIL
        if self._refused or end - self._hole_end < CUT_AT_ONCE:
            return
        try:
            _punch(self._path, self._hole_end, end - self._hole_end)
            self._hole_end = end
        except OSError:  # a file system without holes: the log is cut only at the end
            self._refused = True

    def close(self) -> None:
        """The writers are gone: keep beginning and end, and a line between them with the number of
        missing bytes. If there is no space for that, the log keeps its length.
        """
        try:
            with open(self._path, "r+b") as log:
                left_out = log.seek(0, os.SEEK_END) - KEPT_HEAD - KEPT_TAIL
                if left_out < CUT_AT_ONCE:
                    return
                log.seek(-KEPT_TAIL, os.SEEK_END)
                tail = log.read()
                log.seek(KEPT_HEAD)
                said = f"\n[chaos: {left_out} bytes of output are left out here]\n"
                log.write(said.encode() + tail)
                log.truncate()
        except OSError:
            return


def _punch(path: Path, start: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if libc.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, start, length) != 0:
            raise OSError(ctypes.get_errno(), "cannot punch a hole", str(path))
    finally:
        os.close(fd)
