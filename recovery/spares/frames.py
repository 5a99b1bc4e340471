"""Frames between a rank and a spare that follows it: a JSON header and raw bytes, over a stream
socket. Nothing is unpickled, and every wait is bounded.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Sequence
from typing import Any

from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import MessageError

MAX_HEADER = 64 << 20
"""Bytes; what besides tensors belongs to a state is bounded alike where it is copied
(``recovery.collectives.transfer``).
"""
PURPOSE, VERSION = "live spare", 1


def address_of(sock: socket.socket, token: bytes) -> str:
    """Where a listening spare is reached, and the secret by which its feeder is known:
    ``host port token``.
    """
    host, port = sock.getsockname()[:2]
    return f"{host} {port} {token.hex()}"


def parse(address: str) -> tuple[tuple[str, int], bytes]:
    """The other way round. Raises ValueError."""
    host, port, token = address.split(" ")
    return (host, int(port)), bytes.fromhex(token)


def readable(*socks: socket.socket, within_s: float) -> list[socket.socket]:
    """Those from which something can be read, or whose end can be learned, as soon as there is one
    and after that many seconds at the latest.
    """
    poll = select.poll()  # unlike select(), for descriptors of any number
    for sock in socks:
        poll.register(sock, select.POLLIN)
    ready = {number for number, _ in poll.poll(within_s * 1000)}
    return [sock for sock in socks if sock.fileno() in ready]


def send(sock: socket.socket, header: dict[str, Any], payload: Sequence[memoryview] = ()) -> None:
    """Send a frame. Raises OSError."""
    sizes = [part.nbytes for part in payload]
    sock.sendall(stream.framed(json.dumps(header | {"sizes": sizes}).encode()))
    for part in payload:
        if part.nbytes:
            sock.sendall(part)


def receive(sock: socket.socket, progress: Callable[[], None] | None = None) -> dict[str, Any]:
    """The header of the next frame; its payload is to be read next, with ``stream.fill``. Raises
    MessageError, OSError.
    """
    header = stream.receive(sock, json.loads, MAX_HEADER, progress=progress)
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise MessageError("a header without a kind")
    return header
