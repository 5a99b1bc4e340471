"""The launcher's side of the link proxy."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.links.messages import (
    CloseForward,
    Done,
    Forward,
    Link,
    Probe,
    Probed,
    Routed,
    SetShape,
    line,
)
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.processes import readable

START_LIMIT_S = 30.0
ANSWER_LIMIT_S = 5.0
REAP_LIMIT_S = 5.0


class LinkProxy:
    """Starts the proxy, which ends with ``close`` and, in any case, with this process. ``host``:
    the address it listens at; ``door``: where ranks request routes.
    """

    def __init__(self, host: str = LOOPBACK) -> None:
        import os

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
        self._pending = b""
        self._probes: dict[int, Mapping[str, float | None]] = {}
        self._count = 0
        ours.settimeout(START_LIMIT_S)
        self.door = (host, Routed.model_validate_json(self._line()).port)
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
        self._say(line(SetShape(links=list(links), shape=shape)))
        while not self._take(self._line()):
            pass
        return "link proxy"

    def forward(self, link: Link, host: str, port: int) -> int:
        """Open a port that leads any client to ``host:port`` along ``link``. Raises
        InfrastructureError.
        """
        self._say(line(Forward(link=link, host=host, port=port)))
        while not (text := self._line()).startswith(b'{"port"'):
            self._take(text)
        return Routed.model_validate_json(text).port

    def close_forward(self, port: int) -> None:
        """Accept no more connections at a port from ``forward``."""
        self._say(line(CloseForward(port=port)))
        while not self._take(self._line()):
            pass

    def probe(self, link: Link) -> int:
        """Start to measure a link; returns the probe's number."""
        self._count += 1
        self._say(line(Probe(number=self._count, link=link)))
        return self._count

    def probed(self, number: int) -> Mapping[str, Any] | None:
        """Result of a probe (``round_trip_s``, ``mbit_per_s``; None: nothing arrived), once it is
        done.
        """
        while number not in self._probes and (
            b"\n" in self._pending or readable(self._control.fileno())
        ):
            self._take(self._line())
        return self._probes.get(number)

    def close(self) -> None:
        """End the proxy."""
        self._control.close()
        self.process.kill()
        self.process.wait(timeout=REAP_LIMIT_S)

    def _take(self, text: bytes) -> bool:
        """Whether the message confirms a shape; results of probes are stored."""
        if b'"number"' in text:
            probed = Probed.model_validate_json(text)
            self._probes[probed.number] = {
                "round_trip_s": probed.round_trip_s,
                "mbit_per_s": probed.mbit_per_s,
            }
            return False
        Done.model_validate_json(text)
        return True

    def _say(self, data: bytes) -> None:
        try:
            self._control.sendall(data)
        except OSError as error:
            raise InfrastructureError(f"the link proxy is gone: {error}") from error

    def _line(self) -> bytes:
        while b"\n" not in self._pending:
            try:
                data = self._control.recv(1 << 16)
            except OSError as error:
                raise InfrastructureError(f"the link proxy does not answer: {error}") from error
            if not data:
                raise InfrastructureError("the link proxy is gone")
            self._pending += data
        text, self._pending = self._pending.split(b"\n", 1)
        return text
