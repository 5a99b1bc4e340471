"""Measures a link with bytes of its own."""

from __future__ import annotations

import contextlib
import socket
import time

from trainchaos.harness.launch.links.messages import Probed

LIMIT_S = 1.0
SAMPLE_S = 0.3
FAST_BYTES = 16 << 20
LEAST_BYTES = 4096
_CHUNK = 1 << 16


def probe(
    number: int, server: socket.socket, way: tuple[str, int], bytes_per_s: float | None
) -> Probed:
    """One byte there and back, then a stream of bytes there; takes at most about 2 LIMIT_S.

    ``server``: listens at the far end; ``way``: address that leads to it; ``bytes_per_s``: expected
    rate, which sets the amount.
    """
    round_trip_s = mbit_per_s = None
    started_s = time.monotonic()  # connecting counts too: a blocked link makes no connection
    with (
        contextlib.suppress(OSError),
        server,
        socket.create_connection(way, timeout=LIMIT_S) as near,
    ):
        server.settimeout(LIMIT_S)
        far, _ = server.accept()
        with far:
            for sock in (near, far):
                sock.settimeout(LIMIT_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            near.sendall(b"?")
            far.sendall(far.recv(1) and b"!")
            if near.recv(1):
                round_trip_s = round(time.monotonic() - started_s, 6)
                size = (
                    FAST_BYTES
                    if bytes_per_s is None
                    else max(LEAST_BYTES, int(bytes_per_s * SAMPLE_S))
                )
                mbit_per_s = round(_rate(near, far, size), 3)
    return Probed(number=number, round_trip_s=round_trip_s, mbit_per_s=mbit_per_s)


def _rate(near: socket.socket, far: socket.socket, size: int) -> float:
    """Megabits per second, measured at the far end."""
    near.setblocking(False)
    far.setblocking(False)
    block, sent, got = bytes(_CHUNK), 0, 0
    started_s = time.monotonic()
    while got < size and time.monotonic() - started_s < LIMIT_S:
        moved = False
        if sent < size:
            with contextlib.suppress(BlockingIOError):
                sent += near.send(block[: min(_CHUNK, size - sent)])
                moved = True
        with contextlib.suppress(BlockingIOError):
            got += len(far.recv(_CHUNK))
            moved = True
        if not moved:
            time.sleep(0.0005)
    return got * 8e-6 / (time.monotonic() - started_s)
