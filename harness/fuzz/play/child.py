"""A program as a child: in a process group of its own, held by its pidfd, with a bound, and never
left behind.
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
"""For a program that was asked to end, and for the kernel to end one that did not."""
MOST_OUTPUT = 1 << 20
_PR_SET_PDEATHSIG = 1


class Child:
    """A context in which a program runs: when it is left, its process group is gone. ``output``:
    file that gets what it prints. Raises OSError when it cannot be started.
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

    def __enter__(self) -> Child:
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
        """Its own, and its group's."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative: the signal that ended it; None: it runs."""
        return self._process.returncode

    @property
    def said(self) -> str:
        """The end of what it has printed."""
        with self._output.open("rb") as stream:
            stream.seek(max(0, self._output.stat().st_size - MOST_OUTPUT))
            return stream.read().decode(errors="replace").strip()

    def await_end(self, limit_s: float) -> bool:
        """Wait for it; False: it runs on."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))

    def end(self) -> None:
        """Ask it to end, then kill its group; safe to repeat. Nobody has waited for it until then,
        so that its number, which is its group's, is nobody else's.
        """
        if self._process.returncode is not None:
            return
        with undisturbed():
            if not self.await_end(0):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            if not self.await_end(END_LIMIT_S):
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            # it hangs in the kernel: what is left says so
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_LIMIT_S)
            os.close(self._pidfd)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Have requests to end wait meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tied(parent: int) -> None:
    """Have the kernel ask this process to end when the one that started it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before the request was in place
        os._exit(1)
