"""Starts the ranks of a job whose stack has no launcher of its own, as a cluster starts processes:
each by itself, none ended because another one did, and started again as often as it is told.

    python -m trainchaos.harness.peers.supervise --ranks 4 [--restarts 3] -- program argument...

Each rank finds ``JOB_RANK`` and ``WORLD_SIZE`` in its environment, and ``MASTER_ADDR`` and
``MASTER_PORT``, two ports above which are free as well. All of them die with this process, and this
process with its parent. It ends when they all have: with 0 if at least one trained to the end, else
as the first that failed.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from trainchaos.harness.peers.launching import PeerLauncher, job_of_environment

LINGER_S = 5.0
"""The job is done with the first rank that is: so long the others may take."""
HOST = "127.0.0.1"


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
