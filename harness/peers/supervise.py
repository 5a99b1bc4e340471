"""Starts what a stack's documentation has its users start by hand (a master, an agent, a cluster,
or the ranks of a job without a launcher), and ends all of it.

A launcher is a child subreaper: what its children leave behind, daemons in sessions of their own
included, becomes a child of the launcher, so that it can be found by descent and ended; nothing is
ended by name.

    python -m trainchaos.harness.peers.supervise --ranks 4 [--restarts 3] -- program argument...

starts ranks as a cluster does: each by itself, none ended because another one did, and started
again as often as it is told. Each finds ``JOB_RANK`` and ``WORLD_SIZE`` in its environment, and
``MASTER_ADDR`` and ``MASTER_PORT``, two ports above which are free as well. All of them die with
this process, and this process with its parent. It ends when they all have: with 0 if at least one
trained to the end, else as the first that failed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.compare.environments.stack import CommonJob
from trainchaos.harness.script.processes.guard import (
    PR_SET_PDEATHSIG,
    descendants,
    kill,
    reaped,
)
from trainchaos.recovery.process.processes import become_subreaper, die_with

HOST = "127.0.0.1"
LINGER_S = 5.0
"""The job is done with the first rank that is: so long the others may take."""
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

    def __enter__(self) -> Self:
        parent = os.getppid()
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        become_subreaper()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went before the request was in place
            raise LauncherStopped(128 + signal.SIGTERM)
        return self

    def __exit__(self, *_: object) -> None:
        self.end_all()

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> int:
        """Start a program that dies with this process; its pid. Raises OSError when it cannot be
        started.
        """
        mine, mask = os.getpid(), self._signals

        def tie() -> None:
            die_with(mine)
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


class PeerSupervisor(PeerLauncher):
    """The ranks of one job. ``environments``: of each; ``restarts``: how often each may be started
    again; ``beside``: other programs of the job, by name, each with its environment; nothing is
    done when one of them ends but to say so.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        *,
        restarts: int = 0,
        beside: Mapping[str, tuple[Sequence[str], Mapping[str, str]]] | None = None,
    ) -> None:
        super().__init__()
        self._command, self._environments = list(command), environments
        self._left = [restarts] * len(environments)
        self._beside = beside or {}
        self._names: dict[int, str] = {}
        self._living: dict[int, int] = {}
        self._done = False
        self._failed = 0

    def run(self) -> int:
        """Start all and wait for the ranks; returns the exit code of the job."""
        with self:
            for name, (argv, env) in self._beside.items():
                self._names[self.start(argv, env)] = name
            for rank in range(len(self._environments)):
                self._start_rank(rank)
            self._wait_for_ranks()
        return 0 if self._done else self._failed

    def _start_rank(self, rank: int) -> None:
        self._living[self.start(self._command, self._environments[rank])] = rank

    def _wait_for_ranks(self) -> None:
        deadline: float | None = None
        while self._living:
            self._look(0)
            while self._ended:
                self._see(*self._ended.popitem())
            if self._done and deadline is None:
                deadline = time.monotonic() + LINGER_S
            if deadline is not None and time.monotonic() > deadline:
                say(
                    f"ranks {sorted(self._living.values())} did not end with the others, and are"
                    " killed"
                )
                return

    def _see(self, pid: int, code: int) -> None:
        if pid in self._names:
            say(f"{self._names[pid]} ended with {code}")
        if pid not in self._living:
            return
        rank = self._living.pop(pid)
        if code == 0:
            self._done = True
            return
        self._failed = self._failed or code
        if self._left[rank] and not self._done:
            self._left[rank] -= 1
            say(
                f"rank {rank} ended with {code}, and is started again ({self._left[rank]} restarts"
                " left)"
            )
            self._start_rank(rank)
        else:
            say(f"rank {rank} ended with {code}")


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Where the ranks of one job meet. A rank finds its number under no standard name on purpose:
    stacks start some processes that inherit a rank's environment and are none.
    """
    meeting = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_ports(3)), "WORLD_SIZE": str(ranks)}
    return [{**os.environ, **meeting, "JOB_RANK": str(rank)} for rank in range(ranks)]


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on now. Raises OSError when there are
    none.
    """
    for first in random.sample(range(20000, 32000), 200):
        held = [socket.socket() for _ in range(count)]
        try:
            for offset, one in enumerate(held):
                one.bind((HOST, first + offset))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise OSError(f"no {count} free ports in a row")


def say(text: str) -> None:
    """One line on standard error."""
    print(f"supervise: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """The ranks of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainchaos.harness.peers.supervise", description=__doc__
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0, help="of each rank")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    job_of_environment()
    environments = rank_environments(options.ranks)
    sys.exit(PeerSupervisor(options.command, environments, restarts=options.restarts).run())


if __name__ == "__main__":
    main()
