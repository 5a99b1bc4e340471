"""Agents as processes of this machine, each at an address of its own, and a fleet for them: for
tests of nodes.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.support.clusters.cluster import agent_command
from tests.support.running import LIMIT_S
from trainchaos.recovery.nodes.coordinator.fleet import Fleet, FleetReport
from trainchaos.recovery.nodes.coordinator.loss import FleetLimits
from trainchaos.recovery.nodes.coordinator.node_state import ClockMeasured
from trainchaos.recovery.nodes.link.protocol import Heard
from trainchaos.recovery.transport.wire import Extra, Message

ROOT = Path(__file__).resolve().parents[3]
RANK = "tests.support.clusters.tiny_rank"


def heard(process: str, message: Message) -> Heard:
    """What an agent says when a process has sent a message."""
    (line,) = Heard.of([(process, message)])
    return line


class AgentProcess:
    """One agent. Ended by ``close``, whatever it does."""

    def __init__(self, command: list[str], log: Path) -> None:
        with open(log, "ab") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self.log = log

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def gone(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"its agent ended with {code}"

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(LIMIT_S)

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def said(self) -> str:
        return self.log.read_text()


class Place(Protocol):
    """Where nodes are."""

    host: str

    def address(self, node: int) -> str:
        """Of a node."""

    def at(self, node: int, command: list[str]) -> list[str]:
        """The command line that runs a command there."""


class Here:
    """All are this machine."""

    host = "127.0.0.1"

    def address(self, node: int) -> str:
        return f"127.0.1.{node + 1}"

    def at(self, node: int, command: list[str]) -> list[str]:
        return command


class Yard:
    """A fleet, its agents, and the run's directory; ``collected``: all that the fleet ever
    reported.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limits: FleetLimits = FleetLimits(),
        token: bytes | None = None,
        place: Place | None = None,
    ) -> None:
        self.folder = folder
        self.token = token or secrets.token_bytes(32)
        self.place: Place = place or Here()
        self.fleet = Fleet(
            token=self.token, host=self.place.host, limits=limits, refused=self._refused
        )
        self.refused: list[str] = []
        self.agents: dict[int, AgentProcess] = {}
        self.run = folder / "run"
        self.run.mkdir()

    def _refused(self, why: str) -> None:
        self.refused.append(why)

    def agent(
        self,
        node: int,
        *,
        token: bytes | None = None,
        port: int | None = None,
        lease_s: float = 60.0,
        tag: str = "",
    ) -> AgentProcess:
        """Start another agent for a node."""
        file = self.folder / f"token{node}{tag}"
        file.write_text((token or self.token).hex())
        file.chmod(0o600)
        at = f"{self.place.host}:{port or self.fleet.address[1]}"
        options = ("--address", self.place.address(node), "--lease", str(lease_s))
        rank = ("--entry", f"{RANK}:start", "--cold", RANK, "--module", RANK)
        command = agent_command(at, node, file, self.scratch(node), *options, *rank)
        return AgentProcess(self.place.at(node, command), self.folder / f"agent{node}{tag}.log")

    def start(self, *nodes: int, **options: Any) -> None:
        """Start agents, and wait until they are there."""
        for node in nodes:
            self.agents[node] = self.agent(node, **options)
        self.await_nodes(*nodes)

    def await_nodes(self, *nodes: int, limit_s: float = LIMIT_S) -> None:
        self.fleet.await_nodes(nodes, limit_s=limit_s, gone=self.gone)

    def gone(self, node: int) -> str | None:
        agent = self.agents.get(node)
        return agent.gone() if agent is not None else None

    def scratch(self, node: int) -> Path:
        return self.folder / f"scratch{node}"

    def config(self, name: str, node: int) -> Mapping[str, Any]:
        scratch = self.scratch(node) / self.run.name
        return {
            "name": name,
            "parent": 0,
            "events": str(scratch / "events"),
            "log": str(scratch / f"{name}.log"),
        }

    def spawn(self, name: str, node: int, mode: str = "warm") -> int:
        """A tiny rank."""
        log = f"{self.run.name}/events/{name}.jsonl"
        return self.fleet.spawn(name, node, self.config(name, node), mode=mode, log=log)

    def order(self, name: str, do: str, count: int = 1) -> bool:
        return self.fleet.send(name, Extra(topic="do", payload={"do": do, "count": count}))

    def until(
        self, enough: Callable[[list[FleetReport]], bool], limit_s: float = LIMIT_S
    ) -> list[FleetReport]:
        """Turn until what was reported since the last call is enough; returns it. Measurements of
        clocks, which may come between any two others, are left out.
        """
        found: list[FleetReport] = []
        deadline_s = time.monotonic() + limit_s
        while not enough(found):
            assert time.monotonic() < deadline_s, found
            found += [r for r in self.fleet.wait(0.05) if not isinstance(r, ClockMeasured)]
        return found

    def until_kind(self, kind: type, count: int = 1, process: str = "") -> list[FleetReport]:
        """Until so many reports of one kind (and process) have come."""

        def enough(found: list[FleetReport]) -> bool:
            fitting = [r for r in found if isinstance(r, kind)]
            return (
                sum(not process or getattr(r, "process", "") == process for r in fitting) >= count
            )

        return self.until(enough)

    def file(self, name: str) -> Path:
        return self.folder / self.run.name / name

    def close(self) -> dict[int, str]:
        try:
            return self.fleet.close()
        finally:
            for agent in self.agents.values():
                agent.close()
