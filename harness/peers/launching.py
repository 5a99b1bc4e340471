"""Starts what a stack's documentation has its users start by hand (a master, an agent, a cluster),
and ends all of it.

A launcher is a child subreaper: what its children leave behind, daemons in sessions of their own
included, becomes a child of the launcher, so that it can be found by descent and ended; nothing is
ended by name.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.compare.environments.stack import CommonJob
from trainchaos.harness.script.processes.guard import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    descendants,
    kill,
    reaped,
)

START_LIMIT_S = 60.0
END_LIMIT_S = 10.0
LOOK_S = 0.1
ORDERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LauncherStopped(SystemExit):
    """A signal, or the death of the parent, asked the launcher to end."""


class PeerLauncher:
    """A context in which processes may be started; when it is left, for whatever reason, none of
    them lives.

    ``leftovers``: files and directories to remove then. Signals that ask for an end, and the
    parent's death, raise ``LauncherStopped`` in whatever waits.
    """

    def __init__(self, leftovers: Sequence[Path] = ()) -> None:
        self._leftovers = list(leftovers)
        self._ended: dict[int, int] = {}
        self._signals = {*ORDERS, signal.SIGCHLD}

    def __enter__(self) -> PeerLauncher:
        parent = os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went before the request was in place
            raise LauncherStopped(128 + signal.SIGTERM)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_all()

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> int:
        """Start a program that dies with this process; its pid. Raises OSError when it cannot be
        started.
        """
        mine, mask, libc = os.getpid(), self._signals, ctypes.CDLL(None)

        def tie() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != mine:
                os._exit(1)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, mask)

        child = subprocess.Popen(
            list(argv), env=dict(env), stdin=subprocess.DEVNULL, preexec_fn=tie
        )
        child.returncode = 0  # reaped here, with everything else
        return child.pid

    def wait(self, pid: int) -> int:
        """Until that child ends; its exit code, 128 and the signal if one ended it."""
        while not self._look(pid):
            pass
        return self._ended[pid]

    def wait_for(
        self, ready: Callable[[], bool], pid: int, what: str, limit_s: float = START_LIMIT_S
    ) -> None:
        """Until ``ready``. Raises SystemExit when the child ends before, or with the limit."""
        deadline = time.monotonic() + limit_s
        while not ready():
            if self._look(pid):
                raise SystemExit(f"{what} ended with {self._ended[pid]} before it was ready")
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} was not ready after {limit_s:g} s")

    def end_all(self) -> None:
        """Kill every descendant, then remove the leftovers. Raises SystemExit when some cannot be
        killed in time.
        """
        deadline = time.monotonic() + END_LIMIT_S
        while found := descendants():
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"not ended after {END_LIMIT_S:g} s: {sorted(pid for pid, _ in found)}"
                )
            for pid, started in found:
                kill(pid, started)
            signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
            self._reap()
        self._reap()
        for path in self._leftovers:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _look(self, pid: int, limit_s: float = LOOK_S) -> bool:
        """Wait for a moment, or an end; whether that child has ended."""
        self._reap()
        if pid in self._ended:
            return True
        told = signal.sigtimedwait(self._signals, limit_s)
        if told is not None and told.si_signo in ORDERS:
            raise LauncherStopped(128 + told.si_signo)
        return False

    def _reap(self) -> None:
        for pid, status in reaped():
            code = os.waitstatus_to_exitcode(status)
            self._ended[pid] = code if code >= 0 else 128 - code


def job_of_environment() -> CommonJob:
    """The job that this process's environment describes. Raises SystemExit that says what
    it lacks.
    """
    try:
        job = CommonJob.from_environment(os.environ)
    except ScenarioError as error:
        raise SystemExit(str(error)) from None
    if not os.environ.get("CHAOS_SCRATCH"):
        raise SystemExit("CHAOS_SCRATCH is not set\n  start it by chaos compare")
    return job


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
