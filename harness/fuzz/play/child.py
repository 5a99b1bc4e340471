"""A program as a child in its own process group: bounded in time, and never left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

END_LIMIT_S = 10.0
"""Limit for a program to end on request, and for the kernel to end one that did not."""
MOST_OUTPUT = 1 << 20
_PR_SET_PDEATHSIG = 1


@contextmanager
def child_program(
    argv: Sequence[str], *, env: Mapping[str, str], output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A program while inside; on exit it was asked to end, or killed with its group. ``output``:
    file for its output. Raises OSError if it cannot be started.
    """
    mine = os.getpid()
    with output.open("wb") as stream:
        process = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            preexec_fn=lambda: tied(mine),
        )
    try:
        yield process
    finally:
        with undisturbed():
            process.terminate()
            if not ends(process, END_LIMIT_S):
                os.killpg(process.pid, signal.SIGKILL)  # it was not reaped: the number is its own
                ends(process, END_LIMIT_S)  # where it hangs in the kernel, it is a leftover


def ends(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a process's end; False if it still runs."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def tail_of(output: Path) -> str:
    """The end of a program's output."""
    with output.open("rb") as stream:
        stream.seek(max(0, output.stat().st_size - MOST_OUTPUT))
        return stream.read().decode(errors="replace").strip()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Defer requests to end while inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tied(parent: int) -> None:
    """Make the kernel ask this process to end when its parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent was gone before the request was in place
        os._exit(1)
