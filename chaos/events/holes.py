"""Reads the lines of log files, also of those whose beginning was removed to free space
(``recovery.process.logroom``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20  # far more than any event writer writes
_BLOCK = 1 << 16  # some hundred lines


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


def line_blocks(stream: BinaryIO) -> Iterator[tuple[list[bytes], int]]:
    """The lines from here on, without their newlines, some hundred at a time; with the last ones
    the bytes of a torn line after them, else 0. A line of more than MAX_LINE_BYTES is taken for
    torn, and nothing after it is read.
    """
    while block := stream.read(_BLOCK):
        begun = len(block) - (block.rfind(b"\n") + 1)
        block += stream.readline(MAX_LINE_BYTES - begun)
        *lines, torn = block.split(b"\n")
        yield lines, len(torn)
        if torn:
            return
