"""Listens for agents, and verifies that each knows the run's token: all of them in one thread,
which waits for nobody.

When STRANGERS are not verified yet, others wait in the kernel's queue until one of them is done:
all agents of a job dial at once when its coordinator is back. A connection that sends nothing, or
garbage, delays them little: the oldest is closed for the next as soon as it has had PATIENCE_S.

A thread for each of them was slower: each of its six waits ended in another one, for the
interpreter, which a coordinator with much to do lets go of every 5 ms. Agents whose turn came after
LIMIT_S had hung up by then and dialled again, so that no turn came in time any more.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainchaos.recovery.nodes.link import handshake
from trainchaos.recovery.nodes.link.handshake import LATE, LIMIT_S, AuthenticationFailed
from trainchaos.recovery.nodes.link.link import Link
from trainchaos.recovery.nodes.link.protocol import FROM_AGENT, Hello, Parcel
from trainchaos.recovery.transport.auth import MAX_MESSAGE
from trainchaos.recovery.transport.stream import MessageError

STRANGERS = 1024
PATIENCE_S = 1.0  # many times what a proof takes, and far less than an agent waits for its answer
QUEUE = 4096  # connections that wait to be accepted; the kernel may allow fewer (somaxconn)
AT_ONCE = 64  # connections accepted before those that are there are looked at
CLOSE_LIMIT_S = 2 * LIMIT_S
AGAIN_S = 0.1  # after the system refused a connection, as where all descriptors are taken


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
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._entered: queue.SimpleQueue[tuple[Link, Parcel[Any]]] = queue.SimpleQueue()
        self._strangers: dict[int, _Stranger] = {}  # who came first is first
        self._accepts_s = 0.0  # when connections are accepted again
        self._poll = select.epoll()
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._fd

    def enter(self) -> list[tuple[Link, Parcel[Any]]]:
        """Verified connections, each with its ``Hello``."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        found = []
        while not self._entered.empty():
            found.append(self._entered.get_nowait())
        return found

    def close(self) -> None:
        """Stop listening, and close all connections that are not verified."""
        os.eventfd_write(self._end, 1)
        self._thread.join(CLOSE_LIMIT_S)
        self._listener.close()
        self._poll.close()
        for stranger in self._strangers.values():
            stranger.close()
        for link, _ in self.enter():
            link.close()
        os.close(self._fd)
        os.close(self._end)

    # ---- its thread

    def _serve(self) -> None:
        self._poll.register(self._end, select.EPOLLIN)
        listens = False
        while True:
            if listens != (wanted := self._has_room() and time.monotonic() >= self._accepts_s):
                listens = wanted
                (self._poll.register if listens else self._poll.unregister)(self._listener.fileno())
            ready = [fd for fd, _ in self._poll.poll(self._due_s(listens))]
            if self._end in ready:
                return
            for fd in ready:
                if fd == self._listener.fileno():
                    self._accept()
                elif (stranger := self._strangers.get(fd)) is not None:
                    self._hear(stranger)
            while (oldest := self._oldest()) is not None and oldest.age_s() >= LIMIT_S:
                self._turn_away(oldest, TimeoutError(LATE))

    def _oldest(self) -> _Stranger | None:
        return next(iter(self._strangers.values()), None)

    def _has_room(self) -> bool:
        """Whether there is room for one more, or the oldest has had its time."""
        oldest = self._oldest()
        return len(self._strangers) < STRANGERS or oldest is None or oldest.age_s() >= PATIENCE_S

    def _due_s(self, listens: bool) -> float:
        """How long nothing has to be done unless something comes."""
        due_s, now_s, oldest = LIMIT_S, time.monotonic(), self._oldest()
        if oldest is not None:
            had_s = LIMIT_S if listens or len(self._strangers) < STRANGERS else PATIENCE_S
            due_s = had_s - oldest.age_s()
        if self._accepts_s > now_s:
            due_s = min(due_s, self._accepts_s - now_s)
        return max(0.0, due_s)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if not self._has_room():
                return
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._accepts_s = time.monotonic() + AGAIN_S
                self._refused(f"a connection could not be accepted: {error.strerror}", None)
                return
            if len(self._strangers) >= STRANGERS and (oldest := self._oldest()) is not None:
                self._turn_away(oldest, ConnectionError("it took too long, and others waited"))
            stranger = _Stranger(sock, str(peer[0]), self._token)
            self._strangers[sock.fileno()] = stranger
            self._poll.register(sock.fileno(), select.EPOLLIN)
            try:
                stranger.ask()
            except OSError as error:
                self._turn_away(stranger, error)

    def _hear(self, stranger: _Stranger) -> None:
        try:
            said = stranger.hear()
        except Exception as error:  # whatever a stranger says, the others are heard
            self._turn_away(stranger, error)
            return
        if said is not None:
            # no stranger from now on: hung up to make room, it would count as an agent that ended
            self._forget(stranger)
            self._entered.put(said)
            os.eventfd_write(self._fd, 1)

    def _turn_away(self, stranger: _Stranger, error: Exception) -> None:
        self._forget(stranger)
        stranger.close()
        node = error.node if isinstance(error, AuthenticationFailed) else None
        # An agent dials again and again, from another port each time: without the port, that is
        # one refusal.
        who = (
            stranger.host if node is None else f"{stranger.host}, which says that it is node {node}"
        )
        self._refused(f"{who}: {error or type(error).__name__}", node)

    def _forget(self, stranger: _Stranger) -> None:
        self._poll.unregister(stranger.fileno)
        del self._strangers[stranger.fileno]


class _Stranger:
    """A connection whose other end is not verified, or has not said who it is. ``host``: where it
    came from.
    """

    def __init__(self, sock: socket.socket, host: str, token: bytes) -> None:
        self.fileno, self.host = sock.fileno(), host
        self._sock = sock
        self._since_s = time.monotonic()
        self._proof = handshake.admitting(token)
        self._link: Link | None = None
        sock.setblocking(False)

    def age_s(self) -> float:
        """Seconds since it came."""
        return time.monotonic() - self._since_s

    def ask(self) -> None:
        """Ask for the proof. Raises OSError."""
        self._say(self._proof.first)

    def hear(self) -> tuple[Link, Parcel[Any]] | None:
        """Go on with what came; the connection and its ``Hello`` once that is there. Raises
        AuthenticationFailed, MessageError, OSError.
        """
        if self._link is not None:
            return self._said_hello(self._link)
        try:
            data = self._sock.recv(MAX_MESSAGE)
        except (BlockingIOError, InterruptedError):
            return None
        answer = self._proof.take(data)
        if (refusal := self._proof.refusal) is not None:
            with suppress(OSError):
                self._say(answer)
            raise refusal
        if answer:
            self._say(answer)
        if (key := self._proof.key) is not None:
            self._link = Link(self._sock, handshake.admitted(key), FROM_AGENT)
        return None

    def _said_hello(self, link: Link) -> tuple[Link, Parcel[Any]] | None:
        parcels = link.take()
        if not parcels:
            return None
        if len(parcels) > 1:
            raise MessageError("more than one message before an answer")
        if not isinstance(parcels[0].frame, Hello):
            raise MessageError(f"{type(parcels[0].frame).__name__} before it said who it is")
        return link, parcels[0]

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _say(self, what: bytes) -> None:
        """Less than a new connection's buffer takes, so that this need not wait."""
        if self._sock.send(what) < len(what):
            raise ConnectionError("it does not take what is said to it")
