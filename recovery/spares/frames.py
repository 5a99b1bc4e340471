"""Frames between a rank and a spare that follows it: a JSON header and raw bytes, over a stream
socket. Nothing is unpickled, and every wait is bounded.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

MAX_HEADER = 64 << 20
"""Bytes; what besides tensors belongs to a state is bounded alike where it is copied
(``recovery.collectives.transfer``).
"""
_LENGTH = struct.Struct("!I")
PURPOSE, VERSION = "live spare", 1


class FrameError(Exception):
    """The other side closed, was silent for too long, or sent what is no frame."""


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
    """Send a frame. Raises FrameError."""
    text = json.dumps(header | {"sizes": [part.nbytes for part in payload]}).encode()
    try:
        sock.sendall(_LENGTH.pack(len(text)) + text)
        for part in payload:
            if part.nbytes:
                sock.sendall(part)
    except OSError as error:
        raise FrameError(error.strerror or "no progress") from error


def _quiet() -> None:
    """Nobody has to be told."""


def receive(sock: socket.socket, progress: Callable[[], None] = _quiet) -> dict[str, Any]:
    """The header of the next frame; its payload is to be read next. Raises FrameError."""
    size = bytearray(_LENGTH.size)
    fill(sock, memoryview(size), progress)
    (length,) = _LENGTH.unpack(size)
    if not 0 < length <= MAX_HEADER:
        raise FrameError(f"a header of {length} bytes")
    text = bytearray(length)
    fill(sock, memoryview(text), progress)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise FrameError("a header that is not JSON") from error
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str):
        raise FrameError("a header without a kind")
    return header


def fill(sock: socket.socket, into: memoryview, progress: Callable[[], None] = _quiet) -> None:
    """Receive exactly so many bytes; each part within the socket's timeout, and each followed by a
    call of ``progress``. Raises FrameError.
    """
    done = 0
    while done < into.nbytes:
        try:
            got = sock.recv_into(into[done:])
        except OSError as error:
            raise FrameError(error.strerror or "silent for too long") from error
        if not got:
            raise FrameError("closed by the other side")
        done += got
        progress()
