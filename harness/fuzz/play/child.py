"""A program as a child in its own process group: held by its pidfd, bounded in time, and never left
behind.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

END_LIMIT_S = 10.0
"""Limit for a program to end on request, and for the kernel to end one that did not."""
MOST_OUTPUT = 1 << 20
_PR_SET_PDEATHSIG = 1


class ChildProgram:
    """A context in which a program runs: on exit its process group is gone. ``output``: file for
    its output. Raises OSError if it cannot be started.
    """

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], output: Path) -> None:
        self._output = output
        mine = os.getpid()
        with output.open("wb") as stream:
            self._process = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                preexec_fn=lambda: tied(mine),
            )
        self._pidfd = os.pidfd_open(self._process.pid)

    def __enter__(self) -> ChildProgram:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Its pid, which is also its group's."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""
        return self._process.returncode

    @property
    def said(self) -> str:
        """The end of its output."""
        with self._output.open("rb") as stream:
            stream.seek(max(0, self._output.stat().st_size - MOST_OUTPUT))
            return stream.read().decode(errors="replace").strip()

    def await_end(self, limit_s: float) -> bool:
        """Wait for its end; False if it still runs."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))

    def end(self) -> None:
        """Ask it to end, then kill its group; safe to repeat. It has not been reaped until then, so
        its pid, which is its group's, cannot have been reused.
        """
        if self._process.returncode is not None:
            return
        with undisturbed():
            if not self.await_end(0):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            if not self.await_end(END_LIMIT_S):
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            # it hangs in the kernel: the check for leftovers reports it
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
            os.close(self._pidfd)


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
