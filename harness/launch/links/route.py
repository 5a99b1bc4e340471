"""The rank's side of the link proxy: requests a route to a peer."""

from __future__ import annotations

import socket

from trainchaos.harness.launch.links.messages import Route, Routed, line

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
        return self._door[0], Routed.model_validate_json(self._ask(line(request))).port

    def _ask(self, request: bytes) -> bytes:
        try:
            with socket.create_connection(self._door, timeout=LIMIT_S) as sock:
                sock.sendall(request)
                with sock.makefile("rb") as answers:
                    answer = answers.readline()
        except OSError as error:
            raise RuntimeError(f"the link proxy does not answer: {error}") from error
        if not answer:
            raise RuntimeError("the link proxy is gone")
        return answer
