"""The command line in a terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke

ROOT = Path(__file__).resolve().parents[3]
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines_in_terminal(columns: int, *argv: str, rows: int = 24, at: Path = ROOT) -> list[str]:
    """Every line that ``chaos ARGV`` writes to a terminal, without control sequences; of a line
    that was written again and again, each state.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    written: list[bytes] = []
    reader = threading.Thread(target=_read_all, args=(ours, written), daemon=True)
    reader.start()
    with (
        pytest.MonkeyPatch.context() as patch,
        os.fdopen(theirs, "w", buffering=1) as screen,
        _descriptors(theirs),
    ):
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, screen)
        for name in ("COLUMNS", "LINES"):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm")
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "argv", ["chaos", *argv])
        patch.chdir(at)
        invoke(argv)
    reader.join(timeout=60)
    os.close(ours)
    return re.split(r"[\r\n]+", _CONTROL.sub("", b"".join(written).decode()))


@contextmanager
def _descriptors(terminal: int) -> Iterator[None]:
    """Standard input and outputs are the terminal: its size is asked of them."""
    before = [os.dup(number) for number in range(3)]
    try:
        for number in range(3):
            os.dup2(terminal, number)
        yield
    finally:
        for number, kept in enumerate(before):
            os.dup2(kept, number)
            os.close(kept)


def _read_all(ours: int, written: list[bytes]) -> None:
    while part := _read(ours):
        written.append(part)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # nobody has the other end any more
        return b""
