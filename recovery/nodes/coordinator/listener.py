"""Listens for agents, and verifies that each knows the run's token: all of them in one thread,
which waits for nobody.

When STRANGERS are not verified yet, others wait until one of them is done: all agents of a job dial
at once when its coordinator is back. A connection that sends nothing, or garbage, delays them
little: the oldest is closed for the next as soon as it has had PATIENCE_S.

A thread for each of them was slower: each of its six waits ended in another one, for the
interpreter, which a coordinator with much to do lets go of every 5 ms. Agents whose turn came after
LIMIT_S had hung up by then and dialled again, so that no turn came in time any more.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainchaos.recovery.nodes.link import handshake
from trainchaos.recovery.nodes.link.link import READ, Link
from trainchaos.recovery.nodes.link.protocol import Hello, Parcel
from trainchaos.recovery.transport.auth import LATE, LIMIT_S, MAX_MESSAGE, AuthenticationFailed
from trainchaos.recovery.transport.stream import MessageError

STRANGERS = 1024
PATIENCE_S = 1.0  # many times what a proof takes, and far less than an agent waits for its answer
QUEUE = 4096  # connections that wait to be accepted; the kernel may allow fewer (somaxconn)
CLOSE_LIMIT_S = 2 * LIMIT_S
AGAIN_S = 0.1  # after the system refused a connection, as where all descriptors are taken

Entered = tuple[Link, Parcel[Any]]


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
        self._entered: queue.SimpleQueue[Entered] = queue.SimpleQueue()
        self._strangers: dict[asyncio.Task[None], tuple[float, str]] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._room = self._loop.create_future()  # done when a stranger has gone
        self._main = self._loop.create_task(self._listen())
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._fd

    def enter(self) -> list[Entered]:
        """Verified connections, each with its ``Hello``."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        found = []
        while not self._entered.empty():
            found.append(self._entered.get_nowait())
        return found

    def close(self) -> None:
        """Stop listening, and close all connections that are not verified."""
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(CLOSE_LIMIT_S)
        self._listener.close()
        for link, _ in self.enter():
            link.close()
        os.close(self._fd)

    # ---- its thread

    def _serve(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.close()

    async def _listen(self) -> None:
        try:
            await self._accept()
        finally:
            left = [task for task in self._strangers if task.cancel()]
            await asyncio.gather(*left, return_exceptions=True)

    async def _accept(self) -> None:
        loop = self._loop
        while True:
            try:
                sock, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                self._refused(f"a connection could not be accepted: {error.strerror}", None)
                await asyncio.sleep(AGAIN_S)
                continue
            while len(self._strangers) >= STRANGERS:
                oldest, (since_s, host) = next(iter(self._strangers.items()))
                left_s = since_s + PATIENCE_S - loop.time()
                if left_s <= 0:
                    self._forget(oldest)
                    oldest.cancel()
                    self._turn_away(host, ConnectionError("it took too long, and others waited"))
                    continue
                self._room = loop.create_future()
                await asyncio.wait({self._room}, timeout=left_s)
            host = str(peer[0])
            self._strangers[loop.create_task(self._greet(sock, host))] = loop.time(), host

    async def _greet(self, sock: socket.socket, host: str) -> None:
        """Let one in, or turn it away."""
        task: Any = asyncio.current_task()
        try:
            async with asyncio.timeout(LIMIT_S):
                entered = await self._admit(sock)
        except asyncio.CancelledError:
            sock.close()
            raise
        except Exception as error:  # whatever a stranger says, the others are heard
            self._forget(task)
            sock.close()
            self._turn_away(host, TimeoutError(LATE) if type(error) is TimeoutError else error)
        else:
            # no stranger from now on: hung up to make room, it would count as an agent that ended
            self._forget(task)
            self._entered.put(entered)
            os.eventfd_write(self._fd, 1)

    async def _admit(self, sock: socket.socket) -> Entered:
        """Raises AuthenticationFailed, MessageError, OSError."""
        loop, proof = self._loop, handshake.admitting(self._token)
        await loop.sock_sendall(sock, proof.first)
        while proof.key is None:
            answer = proof.take(await loop.sock_recv(sock, MAX_MESSAGE))
            with suppress(OSError):
                await loop.sock_sendall(sock, answer)
            if proof.refusal is not None:
                raise proof.refusal
        link = Link(sock, proof.key, agent=False)
        while not (parcels := link.took(await loop.sock_recv(sock, READ))):
            pass
        if len(parcels) > 1:
            raise MessageError("more than one message before an answer")
        if not isinstance(parcels[0].frame, Hello):
            raise MessageError(f"{type(parcels[0].frame).__name__} before it said who it is")
        return link, parcels[0]

    def _forget(self, stranger: asyncio.Task[None]) -> None:
        self._strangers.pop(stranger, None)
        if not self._room.done():
            self._room.set_result(None)

    def _turn_away(self, host: str, error: Exception) -> None:
        node = error.node if isinstance(error, AuthenticationFailed) else None
        # An agent dials again and again, from another port each time: without the port, that is
        # one refusal.
        who = host if node is None else f"{host}, which says that it is node {node}"
        self._refused(f"{who}: {error or type(error).__name__}", node)
