"""The supervisor's side: starts one keeper per node, ends a keeper that does not answer, and
replaces one that ends, as soon as its node takes another.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.checkpoint.memory.keeper import (
    PEERS_TOPIC,
    PULSE_TOPIC,
    TOPIC,
    KeeperConfig,
)
from trainchaos.recovery.checkpoint.memory.keeper_host import KeeperHost
from trainchaos.recovery.checkpoint.memory.peers import Address
from trainchaos.recovery.checkpoint.memory.pulse import Pulse
from trainchaos.recovery.process.host import Exited, MessageReceived
from trainchaos.recovery.transport.wire import Extra

START_LIMIT_S = 30.0
END_LIMIT_S = 10.0
MAX_KEEPERS = 1000  # of one node; beyond, the node goes without
KEPT_GONE = 64  # keepers that have ended; a node has only one after the other


class KeeperStarted(BaseModel):
    """A keeper was started."""

    model_config = ConfigDict(frozen=True)

    what: Literal["started"] = "started"
    process: str
    pid: int
    node: int


class Keepers:
    """``keeper_host``: where keepers run; it is closed with this. Raises InfrastructureError."""

    def __init__(
        self, keeper_host: KeeperHost, *, job: str, nodes: int, limit_bytes: int, replicate: bool
    ) -> None:
        self._keeper_host = keeper_host
        self._job = job
        self._nodes = nodes
        self._limit_bytes = limit_bytes
        self._replicate = replicate
        self._secret = secrets.token_hex(32)
        self._place = f"trainchaos-{secrets.token_hex(16)}"
        self._count = 0
        self._ending = False
        self._pids: dict[str, int] = {}
        self._node_of: dict[str, int] = {}
        self._keeper: dict[int, str] = {}
        self._gone: deque[str] = deque()
        self._lacking: set[int] = set()  # nodes without one, as soon as they take one
        self._ports: dict[str, int] = {}
        self._pulse = Pulse(START_LIMIT_S)
        self._hung: dict[str, float] = {}
        self._news: list[KeeperStarted | Exited] = []
        try:
            for node in range(nodes):
                self._start(node)
            self._await(range(nodes))
        except BaseException:
            self._keeper_host.close()
            raise

    def socket_of(self, node: int) -> str:
        """Name of the abstract socket by which ranks of a node reach its keeper, also after a
        replacement.
        """
        return f"{self._place}-{node}"

    def keeper_of(self, node: int) -> str:
        """Name of its current process."""
        return self._keeper[node]

    def owns(self, process: str) -> bool:
        """Whether it is, or was, a keeper: of those that have ended the newest KEPT_GONE are
        remembered.
        """
        return process in self._node_of

    def pid_of(self, process: str) -> int:
        """Its process id; see ``owns``."""
        return self._pids[process]

    def node_of(self, process: str) -> int:
        """The node that it runs, or ran, on; see ``owns``."""
        return self._node_of[process]

    def hung_s(self, process: str) -> float | None:
        """Seconds without an answer, of a keeper that was ended for that; see ``owns``."""
        return self._hung.get(process)

    def signal(self, process: str, signum: int) -> None:
        """Signal a keeper through its pidfd."""
        self._keeper_host.signal(process, signum)

    def os_state(self, process: str) -> str:
        """The process state as the kernel reports it."""
        return self._keeper_host.os_state(process)

    def look(self, timeout_s: float = 0.0) -> list[KeeperStarted | Exited]:
        """Starts and exits since the last call; a keeper that ended is replaced by one that begins
        empty.
        """
        changed: set[int] = set()
        for report in self._keeper_host.wait(timeout_s):
            if isinstance(report, Exited):
                self._news.append(report)
                node = self._node_of[report.process]
                self._gone.append(report.process)
                self._pulse.ended(report.process)
                changed |= {node} if self._ports.pop(report.process, None) is not None else set()
                wanted = not self._ending and self._keeper[node] == report.process
                if wanted and self._count < MAX_KEEPERS * self._nodes:
                    self._lacking.add(node)
            elif isinstance(report, MessageReceived) and isinstance(report.message, Extra):
                if report.process not in self._node_of:
                    continue
                self._pulse.heard(report.process)
                if report.message.topic == TOPIC:
                    self._ports[report.process] = int(report.message.payload["port"])
                    changed.add(self._node_of[report.process])
        self._feel_pulse()
        if changed and not self._ending:
            self._introduce(changed)
        for node in sorted(self._lacking) if not self._ending else ():
            if self._keeper_host.takes(node):
                self._start(node)
        # receivers of the report ask for their pids
        while len(self._gone) > KEPT_GONE + len(self._news):
            oldest = self._gone.popleft()
            del self._pids[oldest], self._node_of[oldest]
            self._hung.pop(oldest, None)
        news, self._news = self._news, []
        return news

    def end(self, limit_s: float = END_LIMIT_S) -> list[Exited]:
        """Kill all and wait for their exits; they are not replaced."""
        self._ending = True
        for process in self._keeper.values():
            self._keeper_host.signal(process, signal.SIGKILL)
        exits: list[Exited] = []
        deadline_s = time.monotonic() + limit_s
        while (
            any(self._keeper_host.alive(name) for name in self._keeper.values())
            and time.monotonic() < deadline_s
        ):
            exits += [news for news in self.look(0.1) if isinstance(news, Exited)]
        return exits

    def close(self) -> dict[int, str]:
        """End all; what could not be removed, as ``Children.close``."""
        return self._keeper_host.close()

    def _feel_pulse(self) -> None:
        """Ask keepers for a sign of life, and end those that hang."""
        asked, hung = self._pulse.turn(
            lambda process: self._keeper_host.takes(self._node_of[process])
        )
        for process in asked:
            self._keeper_host.send(process, Extra(topic=PULSE_TOPIC, payload={}))
        for process, waited_s in hung.items():
            self._hung[process] = round(waited_s, 3)
            self._keeper_host.signal(process, signal.SIGKILL)

    def _start(self, node: int) -> None:
        process = f"k{self._count}"
        self._count += 1
        config = KeeperConfig(
            parent=0,
            node=node,
            nodes=self._nodes,
            number=self._count,
            job=self._job,
            name=self.socket_of(node),
            token=self._secret,
            limit_bytes=self._limit_bytes,
            replicate=self._replicate,
            peers=self._peers(),
            host=self._keeper_host.address(node),
        )
        try:
            pid = self._keeper_host.start(process, config)
        except ConnectionError:
            return  # its node is lost, and lacks a keeper until it is back
        self._lacking.discard(node)
        self._pids[process], self._node_of[process], self._keeper[node] = pid, node, process
        self._pulse.started(process)
        self._news.append(KeeperStarted(process=process, pid=pid, node=node))

    def _peers(self) -> dict[int, Address]:
        return {
            node: (self._keeper_host.address(node), self._ports[name])
            for node, name in self._keeper.items()
            if name in self._ports
        }

    def _introduce(self, changed: Collection[int]) -> None:
        """Send new keepers the addresses of all others, and the others the changes, in one message
        each.
        """
        peers = {str(node): list(address) for node, address in self._peers().items()}
        news = {str(node): peers.get(str(node)) for node in changed}
        for node, process in self._keeper.items():
            if process in self._ports:
                told = peers if node in changed else news
                others = {n: address for n, address in told.items() if n != str(node)}
                self._keeper_host.send(process, Extra(topic=PEERS_TOPIC, payload={"peers": others}))

    def _await(self, nodes: Sequence[int]) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while lacking := [node for node in nodes if self._keeper.get(node) not in self._ports]:
            if lost := [node for node in lacking if node not in self._keeper]:
                raise InfrastructureError(f"node {lost[0]} was lost before its keeper had started")
            for report in self._keeper_host.wait(0.1):
                if isinstance(report, MessageReceived):
                    self._pulse.heard(report.process)
                    self._ports[report.process] = int(report.message.payload["port"])
                elif isinstance(report, Exited):
                    raise InfrastructureError(
                        f"a keeper of checkpoints in memory did not start: {report.how}"
                    )
            if time.monotonic() > deadline_s:
                raise InfrastructureError(f"the keepers did not start within {START_LIMIT_S:.0f} s")
        self._introduce(nodes)
