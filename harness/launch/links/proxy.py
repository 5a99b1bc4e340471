"""The link proxy: ``python -m trainchaos.harness.launch.links.proxy CONTROL``; ends when its
control socket closes.

One thread copies bytes; only a probe, which waits for its own bytes to arrive, has a separate
thread. A rank requests a route to a peer and gets a port for it alone, so groups can form at any
time.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainchaos.harness.launch.links.messages import (
    LONGEST,
    REQUEST,
    CloseRoute,
    Done,
    Link,
    Probe,
    Probed,
    Route,
    Routed,
    SetShape,
)
from trainchaos.harness.launch.links.pipe import Pipe
from trainchaos.harness.launch.links.shaping import OPEN, OPEN_CHUNK, LinkShape, Pacer
from trainchaos.recovery.process.processes import die_with
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import Incoming, Message, MessageError

IDLE_S = 1.0
RETRY_S = 0.02  # between checks whether a blocked link lets a connection through

Ready = Callable[[], None]
LIMIT_S = 1.0
SAMPLE_S = 0.3
FAST_BYTES = 16 << 20
LEAST_BYTES = 4096
_CHUNK = 1 << 16


@dataclass
class _Rule:
    shape: LinkShape
    since_s: float


class _Connection:
    """A rank's connection, and the one to its peer, made as soon as the links in both directions
    are open.
    """

    def __init__(self, link: Link, near: socket.socket, far: tuple[str, int]) -> None:
        self.link = link
        self.near = near
        self.far_at = far
        self.far: socket.socket | None = None
        self.pipes: tuple[Pipe, ...] = ()
        self.watched: dict[socket.socket, int] = {}


class Proxy:
    """The event loop. ``control``: connection to the launcher, which may send every request; ranks
    may only request routes. ``host``: the address at which ranks find it.
    """

    def __init__(self, control: socket.socket, host: str) -> None:
        self._host = host
        self._selector = selectors.DefaultSelector()
        self._rules: dict[Link, _Rule] = {}
        self._connections: list[_Connection] = []
        self._buffer = bytearray(OPEN_CHUNK)
        self._servers: dict[int, socket.socket] = {}
        self._over = False
        self._seed = 0
        self._lock = threading.Lock()  # answers of probes
        self._control = control
        self._listen_to(control, trusted=True)
        self.door = self._listen(self._welcome)

    def run(self) -> None:
        """Serve until the launcher closes its side."""
        while not self._over:
            now_s = time.monotonic()
            wake_s = min(
                (self._next_s(c, now_s) for c in self._connections), default=now_s + IDLE_S
            )
            for key, _ in self._selector.select(max(0.0, min(IDLE_S, wake_s - now_s))):
                key.data()
            now_s = time.monotonic()
            for connection in list(self._connections):
                self._serve(connection, now_s)

    # ---- requests

    def _listen(self, accepted: Callable[[socket.socket], None], *, once: bool = False) -> int:
        server = socket.create_server((self._host, 0), backlog=64)
        server.setblocking(False)

        def ready() -> None:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            if once:
                self._selector.unregister(server)
                server.close()
            sock.setblocking(False)
            accepted(sock)

        self._selector.register(server, selectors.EVENT_READ, ready)
        port = int(server.getsockname()[1])
        if not once:
            self._servers[port] = server
        return port

    def _welcome(self, sock: socket.socket) -> None:
        self._listen_to(sock, trusted=False)

    def _listen_to(self, sock: socket.socket, *, trusted: bool) -> None:
        sock.setblocking(False)
        incoming = Incoming(LONGEST)

        def ready() -> None:
            try:
                data = sock.recv(1 << 16)
                for document in incoming.take(data):
                    self._obey(REQUEST(document), sock, trusted=trusted)
            except BlockingIOError:
                return
            except (OSError, MessageError):
                data = b""  # gone, or none of our ranks
            if not data:
                self._selector.unregister(sock)
                sock.close()
                self._over = self._over or trusted

        self._selector.register(sock, selectors.EVENT_READ, ready)

    def _obey(self, request: Any, sock: socket.socket, *, trusted: bool) -> None:
        if isinstance(request, Route):
            accepted = partial(self._accepted, request.link, (request.host, request.port))
            self._answer(sock, Routed(port=self._listen(accepted, once=not request.stays)))
        elif isinstance(request, CloseRoute):
            server = self._servers.pop(request.port)
            self._selector.unregister(server)
            server.close()
            self._answer(sock, Done())
        elif isinstance(request, SetShape):
            self._shape(request)
            self._answer(sock, Done())
        elif isinstance(request, Probe) and trusted:
            port = self._probe_port(request.link)
            threading.Thread(target=self._probe, args=(request, *port), daemon=True).start()

    def _answer(self, sock: socket.socket, message: Message) -> None:
        with self._lock:
            try:
                stream.send(sock, message)
            except OSError:
                pass  # the client is gone

    def _shape(self, request: SetShape) -> None:
        now_s = time.monotonic()
        for link in request.links:
            self._rules[link] = _Rule(request.shape, now_s)
            for pipe in (p for c in self._connections for p in c.pipes if p.link == link):
                pipe.pacer = self._pacer(link)

    def _pacer(self, link: Link) -> Pacer:
        rule = self._rules.get(link) or _Rule(OPEN, 0.0)
        self._seed += 1
        return Pacer(rule.shape, rule.since_s, self._seed)

    # ---- probes

    def _probe_port(self, link: Link) -> tuple[socket.socket, int]:
        """A server for one probe, and the port that leads to it through the shaped link."""
        server = socket.create_server((self._host, 0))
        port = self._listen(partial(self._accepted, link, server.getsockname()[:2]), once=True)
        return server, port

    def _probe(self, request: Probe, server: socket.socket, port: int) -> None:
        rule = self._rules.get(request.link) or _Rule(OPEN, 0.0)
        self._answer(
            self._control,
            probe(request.number, server, (self._host, port), rule.shape.bytes_per_s),
        )

    # ---- bytes

    def _accepted(self, link: Link, far: tuple[str, int], near: socket.socket) -> None:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.append(_Connection(link, near, far))

    def _next_s(self, connection: _Connection, now_s: float) -> float:
        if connection.far is None:
            return now_s + RETRY_S
        return min(pipe.next_s(now_s) for pipe in connection.pipes)

    def _serve(self, connection: _Connection, now_s: float) -> None:
        if connection.far is None and not self._reach(connection, now_s):
            return
        whole = all([pipe.move(now_s, self._buffer) for pipe in connection.pipes])
        if not whole or all(pipe.over for pipe in connection.pipes):
            self._close(connection)
        else:
            self._watch(connection, now_s)

    def _reach(self, connection: _Connection, now_s: float) -> bool:
        """Connect to the peer once both directions are open: a connection needs answers too."""
        source, sink = connection.link
        back = (sink, source)
        if any(self._pacer(link).opens_s(now_s) > now_s for link in (connection.link, back)):
            return False
        try:
            far = socket.create_connection(connection.far_at, timeout=IDLE_S)
        except OSError:
            self._close(connection)
            return False
        far.setblocking(False)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.far = far
        connection.pipes = (
            Pipe(connection.link, connection.near, far, self._pacer(connection.link)),
            Pipe(back, far, connection.near, self._pacer(back)),
        )
        return True

    def _watch(self, connection: _Connection, now_s: float) -> None:
        wanted: dict[socket.socket, int] = {}
        for pipe in connection.pipes:
            if pipe.wants_read(now_s):
                wanted[pipe.source] = wanted.get(pipe.source, 0) | selectors.EVENT_READ
            if pipe.wants_write:
                wanted[pipe.sink] = wanted.get(pipe.sink, 0) | selectors.EVENT_WRITE
        if wanted == connection.watched:
            return
        for sock in connection.watched:
            self._selector.unregister(sock)
        for sock, events in wanted.items():
            self._selector.register(sock, events, lambda: None)
        connection.watched = wanted

    def _close(self, connection: _Connection) -> None:
        for sock in connection.watched:
            self._selector.unregister(sock)
        connection.near.close()
        if connection.far is not None:
            connection.far.close()
        self._connections.remove(connection)


def main() -> None:
    """Send the door's port, then serve. Arguments: the control socket's descriptor, the parent's
    pid, the address.
    """
    die_with(int(sys.argv[2]))
    control = socket.socket(fileno=int(sys.argv[1]))
    served = Proxy(control, sys.argv[3])
    control.setblocking(True)
    stream.send(control, Routed(port=served.door))
    control.setblocking(False)
    served.run()
    os._exit(0)  # a probe may still be waiting


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


if __name__ == "__main__":
    main()
