"""An uninvolved client and server between two nodes: ``python -m
trainchaos.harness.launch.containers.probing serve ADDRESS PORT`` on one, ``... ask ADDRESS PORT
SECONDS`` on the other, which prints JSON. Uses only the standard library, to start fast.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time

CONNECT_LIMIT_S = 2.0
SERVE_LIMIT_S = 8.0
TRY_S = 0.05
CHUNK = 1 << 16


def serve(address: str, port: int) -> None:
    """Echo one byte, then read until the client closes; at most SERVE_LIMIT_S."""
    until_s = time.monotonic() + SERVE_LIMIT_S
    with socket.create_server((address, port)) as server, contextlib.suppress(OSError):
        server.settimeout(SERVE_LIMIT_S)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(SERVE_LIMIT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(peer.recv(1))
            while time.monotonic() < until_s and peer.recv(CHUNK):
                pass


def ask(address: str, port: int, seconds: float) -> None:
    """Print the round trip of one byte, then send at full rate for ``seconds``."""
    round_trip_s = None
    with contextlib.suppress(OSError), _connect(address, port) as sock:
        sock.settimeout(CONNECT_LIMIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_s = time.monotonic()
        sock.sendall(b"?")
        if sock.recv(1):
            round_trip_s = round(time.monotonic() - began_s, 6)
        _send(sock, seconds)
    print(json.dumps({"round_trip_s": round_trip_s}))


def _send(sock: socket.socket, seconds: float) -> None:
    sock.setblocking(False)
    until_s, block = time.monotonic() + seconds, bytes(CHUNK)
    while time.monotonic() < until_s:
        try:
            sock.send(block)
        except BlockingIOError:
            time.sleep(0.001)


def _connect(address: str, port: int) -> socket.socket:
    """Connect, with retries: the server may not be listening yet."""
    until_s = time.monotonic() + CONNECT_LIMIT_S
    while True:
        try:
            return socket.create_connection(
                (address, port), timeout=max(TRY_S, until_s - time.monotonic())
            )
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(TRY_S)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], int(sys.argv[3]))
    else:
        ask(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
