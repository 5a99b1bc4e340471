"""A rank's side: offers parts of checkpoints to the keeper of its node, lists what keepers hold,
and fetches parts.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from trainchaos.recovery.checkpoint.memory import protocol
from trainchaos.recovery.checkpoint.memory.header import Header, Key
from trainchaos.recovery.checkpoint.memory.peers import (
    ASK_LIMIT_S,
    CONNECT_LIMIT_S,
    transfer_limit_s,
)
from trainchaos.recovery.checkpoint.memory.protocol import (
    Ask,
    Fetch,
    Forget,
    Found,
    Held,
    Kept,
    Line,
    Offer,
    Refusal,
)
from trainchaos.recovery.transport.stream import MessageError

RETRY_S = 0.01
SILENCE_S = 60.0  # of a keeper that receives a part from another node
# all other keepers are asked at once
LIST_LIMIT_S = CONNECT_LIMIT_S + 2 * ASK_LIMIT_S + protocol.HELLO["limit_s"]
_A = TypeVar("_A", Kept, Held, Found)


class KeeperError(Exception):
    """The keeper cannot be reached, or refuses; the message says why."""


class KeeperClient:
    """Thread-safe, one request at a time. ``name``: of the keeper's socket; ``check``: called while
    waiting, and may raise to end it.
    """

    def __init__(self, name: str, *, check: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._check = check
        self._connect_s = 0.0
        self._line = Line(self._connect, check)
        self._lock = threading.Lock()

    def offer(self, header: Header, fd: int) -> Kept:
        """Have a part kept, and copied to another node if there is one. Raises KeeperError."""
        # The keeper's own limits end a copy; this limit is only for a keeper that is stuck itself.
        limit_s = LIST_LIMIT_S + 2 * transfer_limit_s(header.bytes)
        return self._ask(Offer(header=header), Kept, limit_s, 0.0, [fd])[0]

    def listing(self, *, connect_s: float) -> Held:
        """What all reachable keepers hold. Raises KeeperError."""
        return self._ask(Ask(), Held, LIST_LIMIT_S, connect_s)[0]

    def forget(self, step: int, before: int, *, connect_s: float) -> list[Key]:
        """Have all keepers release what generations before ``before`` saved after ``step``; returns
        what was released.

        Raises KeeperError.
        """
        ask = Forget(step=step, before=before)
        return list(self._ask(ask, Kept, LIST_LIMIT_S, connect_s)[0].held)

    def fetch(
        self,
        key: Key,
        *,
        connect_s: float,
        progress: Callable[[], None] = lambda: None,
        limit_s: float = SILENCE_S,
    ) -> tuple[Header, int]:
        """Get a part, with the descriptor of its file, which the caller has to verify and close.
        ``progress``: called as it arrives; ``limit_s``: longest time without any of it arriving.
        Raises KeeperError, what ``check`` raises.
        """
        found, fd = self._ask(Fetch(key=key), Found, limit_s, connect_s, coming=progress)
        if fd is None:
            raise KeeperError("the keeper handed nothing over")
        if found.header.key != key:
            os.close(fd)
            raise KeeperError(f"the keeper handed over {found.header.key.label}, not {key.label}")
        return found.header, fd

    def close(self) -> None:
        """End the connection."""
        with self._lock:
            self._line.close()

    def _ask(
        self,
        message: protocol.Request,
        kind: type[_A],
        limit_s: float,
        connect_s: float,
        fds: Sequence[int] = (),
        coming: Callable[[], None] | None = None,
    ) -> tuple[_A, int | None]:
        with self._lock:
            self._connect_s = connect_s
            try:
                return self._line.ask(message, kind, limit_s=limit_s, fds=fds, coming=coming)
            except Refusal as refusal:
                raise KeeperError(str(refusal)) from refusal
            except (OSError, MessageError) as error:
                raise KeeperError(
                    f"the keeper of this node: {error or type(error).__name__}"
                ) from error

    def _connect(self) -> socket.socket:
        """Connect, waiting a while for a keeper that is only starting."""
        deadline_s = time.monotonic() + self._connect_s
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
