"""Starts the ranks of a job whose stack has no launcher of its own, as a cluster starts processes: each by itself, none
ended because another one did, and started again as often as it is told.

    python -m harness.peers.supervise --ranks 4 [--restarts 3] -- program argument...

Each rank finds ``JOB_RANK`` and ``WORLD_SIZE`` in its environment, and ``MASTER_ADDR`` and ``MASTER_PORT``, two ports
above which are free as well. Ranks die with this process, and this process with its parent. It ends when they all have:
with 0 if at least one trained to the end, else as the first that failed.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

from harness.script.guard import descendants, kill
from recovery import processes

LINGER_S = 20.0
"""The job is done with the first rank that is: so long the others may take."""
KILL_LIMIT_S = 5.0
LOOK_S = 0.5
HOST = "127.0.0.1"


class Supervisor:
    """The ranks of one job. ``environments``: what each finds beside this process's own; ``restarts``: of each;
    ``beside``: other children of this process, pid -> name, whose end is said and nothing else."""

    def __init__(
        self, command: Sequence[str], environments: Sequence[Mapping[str, str]], *, restarts: int = 0,
        beside: Mapping[int, str] | None = None,
    ) -> None:  # fmt: skip
        self._beside = beside or {}
        self._command, self._environments = list(command), environments
        self._left = [restarts] * len(environments)
        self._living: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()
        self._done = False
        self._failed: int | None = None

    def run(self) -> int:
        """Start all ranks and wait for them; returns the exit code of the job."""
        processes.become_subreaper()
        try:
            for rank in range(len(self._environments)):
                self._start(rank)
            self._wait()
        finally:
            self._end()
        return 0 if self._done else (self._failed or 1)

    def _start(self, rank: int) -> None:
        child = subprocess.Popen(
            self._command, env=os.environ | self._environments[rank], stdin=subprocess.DEVNULL,
            preexec_fn=partial(processes.die_with, os.getpid()),
        )  # fmt: skip
        child.returncode = 0  # reaped here, with everything else
        self._living[child.pid] = rank
        self._pidfds[child.pid] = pidfd = os.pidfd_open(child.pid)
        self._poll.register(pidfd, select.POLLIN)

    def _wait(self) -> None:
        deadline: float | None = None
        while self._living:
            self._poll.poll(LOOK_S * 1000)
            self._reap()
            if self._done and deadline is None:
                deadline = time.monotonic() + LINGER_S
            if deadline is not None and time.monotonic() > deadline:
                say(f"ranks {sorted(self._living.values())} did not end with the others, and are killed")
                return

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._living:
                self._ended(pid, os.waitstatus_to_exitcode(status))
            elif pid in self._beside:
                say(f"{self._beside[pid]} ended by {_how(os.waitstatus_to_exitcode(status))}")

    def _ended(self, pid: int, code: int) -> None:
        rank, pidfd = self._living.pop(pid), self._pidfds.pop(pid)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        if code == 0:
            self._done = True
            return
        self._failed = self._failed or (code if code > 0 else 128 - code)
        how = _how(code)
        if self._left[rank] and not self._done:
            self._left[rank] -= 1
            say(f"rank {rank} ended by {how}, and is started again ({self._left[rank]} restarts left)")
            self._start(rank)
        else:
            say(f"rank {rank} ended by {how}")

    def _end(self) -> None:
        """Nobody is left: what ranks have started and left behind became children of this process."""
        deadline = time.monotonic() + KILL_LIMIT_S
        while (left := descendants()) and time.monotonic() < deadline:
            for pid, started in left:
                kill(pid, started)
            time.sleep(0.01)
            self._reap_all()
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    @staticmethod
    def _reap_all() -> None:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Where the ranks of one job meet. A rank finds its number under no standard name on purpose: stacks start some
    processes that inherit a rank's environment and are none."""
    meeting = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_ports(3)), "WORLD_SIZE": str(ranks)}
    return [meeting | {"JOB_RANK": str(rank)} for rank in range(ranks)]


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on now. Raises OSError when there are none."""
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


def prepare() -> None:
    """Die with the parent; end orderly on SIGTERM."""
    processes.die_with(os.getppid())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> None:
    """The ranks of the command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.peers.supervise", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0, help="of each rank")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    prepare()
    sys.exit(Supervisor(options.command, rank_environments(options.ranks), restarts=options.restarts).run())


if __name__ == "__main__":
    main()
