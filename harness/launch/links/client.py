"""The launcher's side of the link proxy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.links.messages import (
    ANSWER,
    LONGEST,
    CloseRoute,
    Done,
    Link,
    Probe,
    Probed,
    Route,
    Routed,
    SetShape,
)
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.processes import readable
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import Incoming, Message

START_LIMIT_S = 30.0
ANSWER_LIMIT_S = 5.0
REAP_LIMIT_S = 5.0
_A = TypeVar("_A", bound=Message)


class LinkProxy:
    """Starts the proxy, which ends with ``close`` and, in any case, with this process. ``host``:
    the address it listens at; ``door``: where ranks request routes.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "trainchaos.harness.launch.links.proxy",
                    str(theirs.fileno()),
                    str(os.getpid()),
                    host,
                ],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise InfrastructureError(f"cannot start the link proxy: {error.strerror}") from error
        finally:
            theirs.close()
        self._control = ours
        self._incoming = Incoming(LONGEST)
        self._pending: list[Any] = []
        self._probes: dict[int, Mapping[str, float | None]] = {}
        self._count = 0
        ours.settimeout(START_LIMIT_S)
        self.door = (host, self._await(Routed).port)
        ours.settimeout(ANSWER_LIMIT_S)

    def refuses(self, link: Link) -> str | None:
        """Nothing: all connections between ranks go through the proxy."""
        return None

    def over(self, link: Link) -> Link:
        """The link itself."""
        return link

    def shape(self, links: Sequence[Link], shape: LinkShape) -> str:
        """Shape directed links, by names of processes; in force when this returns. Raises
        InfrastructureError.
        """
        self._say(SetShape(links=list(links), shape=shape))
        self._await(Done)
        return "link proxy"

    def forward(self, link: Link, host: str, port: int) -> int:
        """Open a port that leads any client to ``host:port`` along ``link``. Raises
        InfrastructureError.
        """
        self._say(Route(link=link, host=host, port=port, stays=True))
        return self._await(Routed).port

    def close_forward(self, port: int) -> None:
        """Accept no more connections at a port from ``forward``."""
        self._say(CloseRoute(port=port))
        self._await(Done)

    def probe(self, link: Link) -> int:
        """Start to measure a link; returns the probe's number."""
        self._count += 1
        self._say(Probe(number=self._count, link=link))
        return self._count

    def probed(self, number: int) -> Mapping[str, Any] | None:
        """Result of a probe (``round_trip_s``, ``mbit_per_s``; None: nothing arrived), once it is
        done.
        """
        while number not in self._probes and (self._pending or readable(self._control.fileno())):
            self._await(Probed)
        return self._probes.get(number)

    def close(self) -> None:
        """End the proxy."""
        self._control.close()
        self.process.kill()
        self.process.wait(timeout=REAP_LIMIT_S)

    def _say(self, message: Message) -> None:
        try:
            stream.send(self._control, message)
        except OSError as error:
            raise InfrastructureError(f"the link proxy is gone: {error}") from error

    def _await(self, kind: type[_A]) -> _A:
        """The next answer of a kind; results of probes before it are stored."""
        while True:
            while not self._pending:
                self._pending += self._read()
            answer = self._pending.pop(0)
            if isinstance(answer, Probed):
                self._probes[answer.number] = {
                    "round_trip_s": answer.round_trip_s,
                    "mbit_per_s": answer.mbit_per_s,
                }
            if isinstance(answer, kind):
                return answer

    def _read(self) -> list[Any]:
        try:
            data = self._control.recv(1 << 16)
        except OSError as error:
            raise InfrastructureError(f"the link proxy does not answer: {error}") from error
        if not data:
            raise InfrastructureError("the link proxy is gone")
        return [ANSWER(document) for document in self._incoming.take(data)]
