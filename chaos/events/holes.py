"""Log files whose beginning was taken away to make room (``recovery.process.logroom``), and lines
of any length.
"""

from __future__ import annotations

import os
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20  # no writer of events comes near


def extent(stream: BinaryIO) -> tuple[int, int]:
    """Where a file's bytes begin, if its beginning was taken away, and how many there are."""
    try:
        start = os.lseek(stream.fileno(), 0, os.SEEK_DATA)
    except OSError:  # it holds nothing, or the file system does not say where
        start = 0
    return start, os.fstat(stream.fileno()).st_size - start


def skip_hole(stream: BinaryIO, start: int) -> int:
    """Go to the first whole line, if the file's beginning was taken away; how many bytes
    that was.
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
