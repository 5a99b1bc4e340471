"""Reads log files whose beginning was removed to free space (``recovery.process.logroom``)."""

from __future__ import annotations

import os
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20  # far more than any event writer writes


def extent(stream: BinaryIO) -> tuple[int, int]:
    """Where a file's data begins, after a removed beginning, and how many bytes it has."""
    try:
        start = os.lseek(stream.fileno(), 0, os.SEEK_DATA)
    except OSError:  # the file is empty, or the file system does not support SEEK_DATA
        start = 0
    return start, os.fstat(stream.fileno()).st_size - start


def skip_hole(stream: BinaryIO, start: int) -> int:
    """Seek to the first whole line if the file's beginning was removed; returns the number of bytes
    skipped.
    """
    stream.seek(start)
    zeros = start
    while block := stream.read(1 << 16):
        left = block.lstrip(b"\0")
        zeros += len(block) - len(left)
        if left:
            break
    stream.seek(zeros)
    if not zeros:
        return 0
    while (part := stream.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
        pass
    return stream.tell()
