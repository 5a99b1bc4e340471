"""Two agents and the coordinators of one job on them, all of them processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.running import EPOCHS, RECOVERABLE, ROOT, Running
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Kind

HOST = "127.0.0.1"


def token_in(folder: Path) -> Path:
    """A new token's file."""
    token = folder / "token"
    token.write_text(os.urandom(32).hex())
    token.chmod(0o600)
    return token


def agent_command(
    coordinator: str, node: int, token: Path, scratch: Path, *options: str
) -> list[str]:
    """The command line of a node's agent."""
    return [
        sys.executable,
        "-m",
        "trainchaos.recovery.nodes.serve",
        "--coordinator",
        coordinator,
        "--node",
        str(node),
        "--token-file",
        str(token),
        "--scratch",
        str(scratch),
        *options,
    ]


class Cluster:
    """Agents of two nodes, and the coordinators of their job, one after the other."""

    running: type[Running] = Running

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = token_in(folder)
        with socket.create_server((HOST, 0)) as free:
            self.at = f"{HOST}:{free.getsockname()[1]}"
        self.agents = [self._agent(node) for node in range(2)]
        self.coordinators: list[Running] = []

    def _agent(self, node: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.agent_command(node),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )

    def agent_command(self, node: int) -> list[str]:
        """The command line of a node's agent."""
        told = ("--health-reports", str(self.reports(node)))
        return agent_command(self.at, node, self.token, self.scratch(node), *told)

    def scratch(self, node: int) -> Path:
        """Where its processes write."""
        return self.folder / f"n{node}"

    def reports(self, node: int) -> Path:
        """To which monitors of a node append what they find."""
        return self.folder / f"reports-{node}.jsonl"

    def job(self, *options: str, epochs: str = EPOCHS) -> Running:
        """A coordinator of the job: the first, or the next."""
        return self.run("--adopt", "--ranks", "4", *options, RECOVERABLE, epochs)

    def run(self, *arguments: str | Path) -> Running:
        """A coordinator, told this besides where its agents are."""
        given = ("--nodes", "2", "--listen", self.at, "--token-file", self.token, *arguments)
        self.coordinators.append(self.running(self.folder, *given))
        return self.coordinators[-1]

    def committed(self) -> int:
        """By the first rank, which is on node 0, whether anybody supervises it or not."""
        steps = EventLogTail(self.scratch(0) / "w0.jsonl").read()
        return max((e.step or 0 for e in steps if e.kind is Kind.STEP_COMMITTED), default=0)

    def close(self) -> None:
        """End everything."""
        for process in [*(c.process for c in self.coordinators), *self.agents]:
            process.kill()
            process.communicate(timeout=60)
