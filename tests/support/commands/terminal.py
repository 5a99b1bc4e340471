"""The command line in a terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines_in_terminal(columns: int, *argv: str, rows: int = 24, at: Path = ROOT) -> list[str]:
    """Every line that ``chaos ARGV`` writes to a terminal, without control sequences; of a line
    that was written again and again, each state.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-m", "trainchaos", *argv],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=at,
        env=environment | {"TERM": "xterm", "NO_COLOR": "1"},
    )
    os.close(theirs)
    written = b""
    try:
        while part := _read(ours):
            written += part
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return re.split(r"[\r\n]+", _CONTROL.sub("", written.decode()))


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # nobody has the other end any more
        return b""
