"""Standard output and error that survive the loss of their reader (what cannot be written is
dropped without an error), and status lines for a person who may not be reading.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TextIO

LONGEST_LINE = 2000  # characters
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
"""Errors that may go away: a full disk below a file that output goes to."""


class Output:
    """A text stream that never raises for lack of a reader (a closed pipe, a terminal that is gone)
    or of disk space.

    ``lost``: why something could not be written, None as long as nothing was lost. All other
    attributes are those of ``stream``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost: str | None = None

    def write(self, text: str) -> int:
        """Write all of the text, or drop it."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._lose(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """One after the other."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what is still in memory, likewise."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError | ValueError) -> None:
        self.lost = (
            self.lost or (error.strerror if isinstance(error, OSError) else None) or str(error)
        )
        if isinstance(error, ValueError) or error.errno in PASSING:
            return
        # Other writers, such as children and buffers, write to /dev/null from now on instead of
        # failing.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            self._stream.flush()


def shield() -> None:
    """Make standard output and error of this process such streams; for programs, at their start. A
    second call changes nothing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # None: the stream was closed from the start
        if stream is not None and not isinstance(stream, Output):
            setattr(sys, name, Output(stream))


def lost_output() -> str | None:
    """Why standard output did not take all of its output, after a last flush; None if it did."""
    stream = sys.stdout
    if not isinstance(stream, Output):
        return None
    stream.flush()
    return stream.lost


class _Unshown:
    """Number of lines dropped since the last one shown."""

    lines = 0


def say(text: str, *, who: str = "recovery") -> None:
    """Print a status line without ever blocking or failing: a terminal that is gone ends nothing,
    and a reader that takes nothing (stopped by Ctrl-S, or a pipe that is not read) delays nothing.
    Dropped lines are counted.
    """
    with suppress(OSError, ValueError):
        if not _takes_a_line():
            _Unshown.lines += 1
            return
        if _Unshown.lines:
            text, _Unshown.lines = f"({_Unshown.lines} lines could not be shown) {text}", 0
        print(f"{who}: {text}"[:LONGEST_LINE], file=sys.stderr, flush=True)


def _takes_a_line() -> bool:
    """Whether a line can be written without waiting: a pipe that is not full takes one of up to 4
    KiB whole.
    """
    try:
        fd = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return True  # not an operating-system file: it accepts every write
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poll.poll(0))
