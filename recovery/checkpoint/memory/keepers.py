"""The supervisor's side: starts one keeper per node, ends one that does not answer (stopped or
stuck, it holds up every save), and replaces one that ends by an empty one, as soon as its node
takes another.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.checkpoint.memory.keeper import (
    PEERS_TOPIC,
    PULSE_TOPIC,
    TOPIC,
    KeeperConfig,
)
from trainchaos.recovery.checkpoint.memory.peers import Address
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.host import Exited, MessageReceived, Report
from trainchaos.recovery.process.local import Children
from trainchaos.recovery.transport.wire import Extra, Message

START_LIMIT_S = 30.0
END_LIMIT_S = 10.0
MAX_KEEPERS = 1000  # a node, on average; beyond, those that end are not replaced
KEPT_GONE = 64  # keepers that have ended are remembered, and those whose end is news
REST_S = 1.0
"""From an answer to the next question."""
HUNG_S = 5.0
"""A keeper answers from a thread that does nothing else: at once, on a busy machine in less than a
second.
"""
LOOK_S = 0.1
"""Between two looks: a supervisor of many keepers turns a thousand times a second."""
TURN_S = 0.5
"""A turn of the supervisor counts for no more: while it was itself paused it heard nobody."""

Fork = Callable[[bytes, Sequence[int]], int]


class KeeperHost(Protocol):
    """Processes by name, as ``recovery.process.local.Children``, each on a node. ``takes``: whether
    a process can be started there now, and a message reaches it; ``address``: at which a keeper of
    that node listens for the others; ``start``: starts a keeper on the node that its configuration
    names, which lacks ``parent`` and ``log``, and returns its pid, or raises InfrastructureError,
    ConnectionError when the node is lost meanwhile.
    """

    def takes(self, node: int) -> bool: ...

    def address(self, node: int) -> str: ...

    def start(self, process: str, config: KeeperConfig) -> int: ...

    def alive(self, process: str) -> bool: ...

    def send(self, process: str, message: Message) -> bool: ...

    def signal(self, process: str, signum: int) -> None: ...

    def os_state(self, process: str) -> str: ...

    def wait(self, timeout_s: float) -> list[Report]: ...

    def close(self) -> dict[int, str]: ...


class LocalKeeperHost:
    """All nodes are this machine. ``fork``: starts a process that becomes ``be_keeper`` of a
    configuration; ``log``: directory for keepers' output, None: the supervisor's output. The caller
    must be a child subreaper.
    """

    def __init__(self, fork: Fork, *, log: Path | None) -> None:
        self._fork = fork
        self._log = log
        self._children = Children()
        self.alive = self._children.alive
        self.send = self._children.send
        self.signal = self._children.signal
        self.os_state = self._children.os_state
        self.wait = self._children.wait
        self.close = self._children.close

    def takes(self, node: int) -> bool:
        return True

    def address(self, node: int) -> str:
        return LOOPBACK

    def start(self, process: str, config: KeeperConfig) -> int:
        log = self._log / f"{process}.log" if self._log is not None else None
        whole = config.model_copy(update={"parent": os.getpid(), "log": log})
        return self._children.begin(
            process, lambda fds: self._fork(whole.model_dump_json().encode(), fds)
        )


class KeeperStarted(BaseModel):
    """A keeper was started."""

    model_config = ConfigDict(frozen=True)

    what: Literal["started"] = "started"
    process: str
    pid: int
    node: int


@dataclass(kw_only=True)
class _Keeper:
    """``port``: once it has said so; ``hung_s``: without an answer, of one that was ended for that;
    ``waited_s``: since the last answer or question; ``limit_s``: for the answer, infinite while
    nothing is asked.
    """

    pid: int
    node: int
    port: int | None = None
    hung_s: float | None = None
    waited_s: float = 0.0
    limit_s: float = START_LIMIT_S

    def answered(self) -> None:
        """It gave a sign of life."""
        self.waited_s, self.limit_s = 0.0, math.inf


class Keepers:
    """``keeper_host``: where keepers run; it is closed with this. Raises InfrastructureError."""

    def __init__(
        self,
        keeper_host: KeeperHost,
        *,
        job: str,
        nodes: int,
        limit_bytes: int,
        replicate: bool,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keeper_host = keeper_host
        self._job = job
        self._nodes = nodes
        self._limit_bytes = limit_bytes
        self._replicate = replicate
        self._clock_s = clock_s
        self._looked_s = clock_s()
        self._secret = secrets.token_hex(32)
        self._place = f"trainchaos-{secrets.token_hex(16)}"
        self._count = 0
        self._ending = False
        self._known: dict[str, _Keeper] = {}
        self._keeper: dict[int, str] = {}
        self._lacking: set[int] = set()  # nodes without one, as soon as they take one
        self._news: list[KeeperStarted | Exited] = []
        try:
            for node in range(nodes):
                self._start(node)
            self._await_all()
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
        """Whether it is a keeper, or one of the last KEPT_GONE that have ended."""
        return process in self._known

    def pid_of(self, process: str) -> int:
        """Its process id."""
        return self._known[process].pid

    def node_of(self, process: str) -> int:
        """The node that it runs, or ran, on."""
        return self._known[process].node

    def hung_s(self, process: str) -> float | None:
        """Seconds without an answer, of a keeper that was ended for that."""
        return self._known[process].hung_s

    def signal(self, process: str, signum: int) -> None:
        self._keeper_host.signal(process, signum)

    def os_state(self, process: str) -> str:
        return self._keeper_host.os_state(process)

    def look(self, timeout_s: float = 0.0) -> list[KeeperStarted | Exited]:
        """Starts and exits since the last call; a keeper that ended is replaced by one that begins
        empty.
        """
        changed: set[int] = set()
        for report in self._keeper_host.wait(timeout_s):
            keeper = self._known.get(report.process)
            if keeper is None:
                continue
            if isinstance(report, Exited):
                self._news.append(report)
                changed |= {keeper.node} if keeper.port is not None else set()
                keeper.port, keeper.limit_s = None, math.inf
                if self._count < MAX_KEEPERS * self._nodes:
                    self._lacking.add(keeper.node)
            elif isinstance(report, MessageReceived) and self._heard(keeper, report.message):
                changed.add(keeper.node)
        if not self._ending:
            self._look_for_hung()
            if changed:
                self._introduce(changed)
            for node in sorted(self._lacking):
                if self._keeper_host.takes(node):
                    self._start(node)
        if self._news:
            running = {*self._keeper.values()}
            gone = [process for process in self._known if process not in running]
            for process in gone[: -KEPT_GONE - len(self._news)]:
                del self._known[process]
        news, self._news = self._news, []
        return news

    def _heard(self, keeper: _Keeper, message: Message) -> bool:
        """Whether it has said where the others reach it."""
        keeper.answered()
        if isinstance(message, Extra) and message.topic == TOPIC:
            keeper.port = int(message.payload["port"])
            return True
        return False

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
        return self._keeper_host.close()

    def _look_for_hung(self) -> None:
        """Ask keepers for a sign of life, and end those that hang. One that cannot be reached is
        neither asked nor waited for meanwhile.
        """
        now_s = self._clock_s()
        if now_s - self._looked_s < LOOK_S:
            return
        passed_s, self._looked_s = min(now_s - self._looked_s, TURN_S), now_s
        for node, process in self._keeper.items():
            keeper = self._known[process]
            if node in self._lacking or keeper.hung_s is not None:
                continue
            keeper.waited_s += passed_s
            reached = self._keeper_host.takes(node)
            if math.isinf(keeper.limit_s):
                if reached and keeper.waited_s >= REST_S:
                    keeper.waited_s, keeper.limit_s = 0.0, HUNG_S
                    self._keeper_host.send(process, Extra(topic=PULSE_TOPIC, payload={}))
            elif not reached:
                keeper.waited_s = 0.0
            elif keeper.waited_s > keeper.limit_s:
                keeper.hung_s = round(keeper.waited_s, 3)
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
        self._known[process], self._keeper[node] = _Keeper(pid=pid, node=node), process
        self._news.append(KeeperStarted(process=process, pid=pid, node=node))

    def _peers(self) -> dict[int, Address]:
        ports = {node: self._known[process].port for node, process in self._keeper.items()}
        return {
            node: (self._keeper_host.address(node), port)
            for node, port in ports.items()
            if port is not None
        }

    def _introduce(self, changed: Collection[int]) -> None:
        """Send new keepers the addresses of all others, and the others the changes, in one message
        each.
        """
        peers = {str(node): list(address) for node, address in self._peers().items()}
        news = {str(node): peers.get(str(node)) for node in changed}
        for node, process in self._keeper.items():
            if str(node) in peers:
                told = peers if node in changed else news
                others = {n: address for n, address in told.items() if n != str(node)}
                self._keeper_host.send(process, Extra(topic=PEERS_TOPIC, payload={"peers": others}))

    def _await_all(self) -> None:
        """Wait until all listen, and introduce them. Raises InfrastructureError."""
        nodes = range(self._nodes)
        if lost := [node for node in nodes if node not in self._keeper]:
            raise InfrastructureError(f"node {lost[0]} was lost before its keeper had started")
        deadline_s = time.monotonic() + START_LIMIT_S
        while any(keeper.port is None for keeper in self._known.values()):
            for report in self._keeper_host.wait(0.1):
                if isinstance(report, MessageReceived):
                    self._heard(self._known[report.process], report.message)
                elif isinstance(report, Exited):
                    raise InfrastructureError(
                        f"a keeper of checkpoints in memory did not start: {report.how}"
                    )
            if time.monotonic() > deadline_s:
                raise InfrastructureError(f"the keepers did not start within {START_LIMIT_S:.0f} s")
        self._introduce(nodes)
