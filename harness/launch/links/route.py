"""The rank's side of the link proxy: requests a route to a peer."""

from __future__ import annotations

import socket
import time

from trainchaos.harness.launch.links.messages import ANSWER, LONGEST, Route, Routed
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import MessageError

LIMIT_S = 5.0
Address = tuple[str, int]


class Router:
    """Routes the connections of process ``name`` through the proxy whose door is at ``door``."""

    def __init__(self, name: str, door: Address) -> None:
        self._name = name
        self._door = door

    def __call__(self, peer: str, address: Address) -> Address:
        """The address to connect to instead of ``address``, where process ``peer`` listens. Raises
        RuntimeError.
        """
        request = Route(link=(self._name, peer), host=address[0], port=address[1])
        try:
            with socket.create_connection(self._door, timeout=LIMIT_S) as sock:
                stream.send(sock, request)
                answer = stream.receive(sock, ANSWER, LONGEST, time.monotonic() + LIMIT_S)
        except (OSError, MessageError) as error:
            raise RuntimeError(f"the link proxy does not answer: {error}") from error
        assert isinstance(answer, Routed)
        return self._door[0], answer.port
