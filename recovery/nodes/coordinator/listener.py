"""Listens for agents, and verifies on a thread per connection, within a bound, that each knows the
run's token.

When STRANGERS are open, others wait in the kernel's queue until one of them is done: all agents of
a job dial at once when its coordinator is back. A connection that sends nothing, or garbage, delays
them little: the oldest is closed for the next as soon as it has had PATIENCE_S.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from trainchaos.recovery.nodes.link import handshake
from trainchaos.recovery.nodes.link.handshake import (
    LIMIT_S,
    AuthenticationFailed,
    ProtocolViolation,
)
from trainchaos.recovery.nodes.link.link import Link, Parcel, await_parcel
from trainchaos.recovery.nodes.link.protocol import FROM_AGENT, Hello

STRANGERS = 64
PATIENCE_S = 1.0  # many times what a proof takes, and far less than an agent waits for its answer
QUEUE = 4096  # connections that wait to be accepted; the kernel may allow fewer (somaxconn)
CLOSE_LIMIT_S = 2 * LIMIT_S


class AgentListener:
    """``address``: to listen at, port 0 for any; ``refused``: called with the address of a rejected
    agent and the reason, and with the node that it claims to be, if it does. ``fileno`` is readable
    once ``enter`` has a connection. Raises OSError.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        *,
        refused: Callable[[str, int | None], None],
    ) -> None:
        self._token = token
        self._refused = refused
        self._listener = socket.create_server(address, backlog=QUEUE)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._entered: queue.SimpleQueue[tuple[Link, Parcel]] = queue.SimpleQueue()
        self._strangers: dict[socket.socket, tuple[threading.Thread, float]] = {}  # since when
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._fd

    def enter(self) -> list[tuple[Link, Parcel]]:
        """Verified connections, each with its ``Hello``."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        found = []
        while not self._entered.empty():
            found.append(self._entered.get_nowait())
        return found

    def close(self) -> None:
        """Stop listening, and close all connections that are not verified."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(CLOSE_LIMIT_S)
        with self._lock:
            strangers = dict(self._strangers)
            self._lock.notify_all()
        for sock in strangers:
            _hang_up(sock)
        for thread, _ in strangers.values():
            thread.join(CLOSE_LIMIT_S)
        for link, _ in self.enter():
            link.close()
        os.close(self._fd)

    def _listen(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(
                target=self._ask, args=(sock, f"{peer[0]}:{peer[1]}"), name="stranger", daemon=True
            )
            with self._lock:
                self._make_room()
                self._strangers[sock] = thread, time.monotonic()
            thread.start()

    def _make_room(self) -> None:
        """Wait until there is room for one more, or the oldest has had its time: close that."""
        while len(self._strangers) >= STRANGERS:
            oldest, (_, since_s) = next(iter(self._strangers.items()))
            left_s = since_s + PATIENCE_S - time.monotonic()
            if left_s <= 0:
                del self._strangers[oldest]
                _hang_up(oldest)
                return
            self._lock.wait(left_s)

    def _ask(self, sock: socket.socket, peer: str) -> None:
        try:
            link = Link(sock, handshake.admit(sock, self._token), FROM_AGENT)
            parcel = await_parcel(link, limit_s=LIMIT_S)
            if not isinstance(parcel.frame, Hello):
                raise ProtocolViolation(f"{parcel.frame.type} before it said who it is")
            self._let_in(sock, link, parcel)
        except (AuthenticationFailed, ProtocolViolation, OSError) as error:
            node = error.node if isinstance(error, AuthenticationFailed) else None
            # An agent dials again and again, from another port each time: without the port, that is
            # one refusal.
            host = peer.rpartition(":")[0]
            who = peer if node is None else f"{host}, which says that it is node {node}"
            self._refused(f"{who}: {error or type(error).__name__}", node)
            sock.close()
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
                self._lock.notify()

    def _let_in(self, sock: socket.socket, link: Link, parcel: Parcel) -> None:
        """A connection is verified, and no stranger from now on. In one step: if it was hung up in
        between to make room, the coordinator would take its agent for one that has ended. Raises
        ConnectionError: it was hung up before.
        """
        with self._lock:
            if self._strangers.pop(sock, None) is None:
                raise ConnectionError("it took too long, and others waited")
            self._lock.notify()
            self._entered.put((link, parcel))
            os.eventfd_write(self._fd, 1)


def _hang_up(sock: socket.socket) -> None:
    """The thread that waits for the connection notices, and closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
