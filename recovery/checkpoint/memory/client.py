"""A rank's side: offers parts of checkpoints to the keeper of its node, lists what keepers hold,
and fetches parts.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable

from trainchaos.recovery.checkpoint.memory import protocol
from trainchaos.recovery.checkpoint.memory.files import MemoryFile, view
from trainchaos.recovery.checkpoint.memory.header import Header, Key
from trainchaos.recovery.checkpoint.memory.peers import (
    ASK_LIMIT_S,
    CONNECT_LIMIT_S,
    transfer_limit_s,
)
from trainchaos.recovery.checkpoint.memory.protocol import (
    Answer,
    Ask,
    Coming,
    Fetch,
    Forget,
    Found,
    Held,
    Kept,
    Offer,
    Refused,
)
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import MessageError

RETRY_S = 0.01
SILENCE_S = 60.0  # of a keeper that receives a part from another node
LOOK_MS = 50
# all other keepers are asked at once
LIST_LIMIT_S = CONNECT_LIMIT_S + 2 * ASK_LIMIT_S + protocol.HELLO_LIMIT_S


class KeeperError(Exception):
    """The keeper cannot be reached, or refuses; the message says why."""


class KeeperClient:
    """Thread-safe, one request at a time. ``name``: of the keeper's socket; ``check``: called while
    waiting, and may raise to end it.
    """

    def __init__(self, name: str, *, check: Callable[[], None] | None = None) -> None:
        self._name = name
        self._check = check or (lambda: None)
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()

    def offer(self, header: Header, fd: int, *, connect_s: float = 0.0) -> Kept:
        """Have a part kept, and copied to another node if there is one. Raises KeeperError."""
        # The keeper's own limits end a copy; this limit is only for a keeper that is stuck itself.
        limit_s = (
            CONNECT_LIMIT_S
            + protocol.HELLO_LIMIT_S
            + ASK_LIMIT_S
            + 2 * transfer_limit_s(header.bytes)
        )
        answer, _ = self._ask(Offer(header=header), [fd], limit_s, connect_s)
        if not isinstance(answer, Kept):
            raise KeeperError("the keeper gave no answer to an offer")
        return answer

    def listing(self, *, connect_s: float) -> Held:
        """What all reachable keepers hold. Raises KeeperError."""
        answer, _ = self._ask(Ask(), [], LIST_LIMIT_S, connect_s)
        if not isinstance(answer, Held):
            raise KeeperError("the keeper gave no answer to a question")
        return answer

    def forget(self, step: int, before: int, *, connect_s: float) -> list[Key]:
        """Have all keepers release what generations before ``before`` saved after ``step``; returns
        what was released.

        Raises KeeperError.
        """
        answer, _ = self._ask(Forget(step=step, before=before), [], LIST_LIMIT_S, connect_s)
        return list(answer.held) if isinstance(answer, Kept) else []

    def fetch(
        self,
        key: Key,
        *,
        connect_s: float,
        progress: Callable[[], None] = lambda: None,
        limit_s: float = SILENCE_S,
    ) -> tuple[Header, MemoryFile]:
        """Get a part, which the caller has to verify and close. ``progress``: called as it arrives;
        ``limit_s``: longest time without any of it arriving. Raises KeeperError, what ``check``
        raises.
        """
        answer, fd = self._ask(Fetch(key=key), [], limit_s, connect_s, progress)
        if not isinstance(answer, Found) or fd is None:
            raise KeeperError("the keeper handed nothing over")
        if answer.header.key != key:
            os.close(fd)
            raise KeeperError(f"the keeper handed over {answer.header.key.label}, not {key.label}")
        return answer.header, view(fd, progress)

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._drop()

    def _ask(
        self,
        message: protocol.Request,
        fds: list[int],
        limit_s: float,
        connect_s: float,
        progress: Callable[[], None] | None = None,
    ) -> tuple[Answer, int | None]:
        with self._lock:
            try:
                answer, fd = self._try(message, fds, limit_s, connect_s, progress)
            except BaseException as error:
                # an answer may still arrive, which must not be taken for that of the next request
                self._drop()
                if not isinstance(error, OSError | MessageError):
                    raise
                raise KeeperError(
                    f"the keeper of this node: {error or type(error).__name__}"
                ) from error
        if isinstance(answer, Refused):
            raise KeeperError(answer.reason)
        return answer, fd

    def _try(
        self,
        message: protocol.Request,
        fds: list[int],
        limit_s: float,
        connect_s: float,
        progress: Callable[[], None] | None,
    ) -> tuple[Answer, int | None]:
        """Use the existing connection, or one new one: the keeper may have been replaced since."""
        for again in (True, False):
            fresh = self._sock is None
            sock = self._sock = self._sock or self._connect(connect_s)
            try:
                sock.settimeout(limit_s)
                stream.send(sock, message, fds)
                while True:
                    if progress is not None:
                        self._await(sock, limit_s)
                    answer, fd = protocol.receive_answer(sock, limit_s=limit_s)
                    if progress is None or not isinstance(answer, Coming):
                        return answer, fd
                    progress()
            except (BrokenPipeError, ConnectionResetError):
                self._drop()
                if fresh or not again:
                    raise
        raise ConnectionResetError("the keeper closed the connection")

    def _await(self, sock: socket.socket, limit_s: float) -> None:
        """Wait for an answer to begin, with calls of ``check``. Raises TimeoutError."""
        deadline_s = time.monotonic() + limit_s
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        while not poll.poll(LOOK_MS):
            self._check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing came within {limit_s:g} s")

    def _connect(self, connect_s: float) -> socket.socket:
        """Connect, waiting up to ``connect_s`` for a keeper that is only starting."""
        deadline_s = time.monotonic() + connect_s
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(CONNECT_LIMIT_S)
                sock.connect("\0" + self._name)
                if not protocol.same_user(sock):
                    raise MessageError("another user listens in its place")
                return sock
            except ConnectionRefusedError:
                sock.close()
                if time.monotonic() >= deadline_s:
                    raise
            except BaseException:
                sock.close()
                raise
            self._check()
            time.sleep(RETRY_S)

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
