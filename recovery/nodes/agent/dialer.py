"""Connects an agent to its coordinator: a thread that connects and authenticates, so that nothing
else waits for it.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from trainchaos.recovery.nodes.link import handshake
from trainchaos.recovery.nodes.link.link import Link
from trainchaos.recovery.transport.auth import LIMIT_S, AuthenticationFailed, TokenRefused

# then a new attempt: the kernel retries a pending connection at growing intervals
CONNECT_LIMIT_S = 1.5
SOONEST_S = 0.02
LATEST_S = 1.0
CLOSE_LIMIT_S = CONNECT_LIMIT_S + LIMIT_S


class Dialer:
    """``address``: of the coordinator; ``node``: number of this one; ``source``: its address, to
    connect from if it is a loopback address; ``say``: called with each error, once in a row.
    ``dial`` begins; then the descriptor is readable once ``link`` has a connection. ``refused``:
    the last attempt ended because the coordinator knows another token.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        *,
        node: int,
        source: str,
        say: Callable[[str], None],
    ) -> None:
        self._address, self._token, self._node = address, token, node
        # For other addresses the route to the coordinator need not be that of the ranks, and
        # answers must come back by it.
        self._source = (source, 0) if source.startswith("127.") else None
        self.refused = False
        self._say, self._said = say, ""
        self._found: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._fd

    def dial(self, *, after_s: float = 0.0) -> None:
        """Connect, with retries until it works: at once, or ``after_s`` seconds later."""
        self._thread = threading.Thread(
            target=self._dial, args=(after_s,), name="dialer", daemon=True
        )
        self._thread.start()

    def link(self) -> Link | None:
        """The connection, once there is one: authenticated, and not used yet."""
        try:
            os.eventfd_read(self._fd)
            return self._found.get_nowait()
        except (BlockingIOError, queue.Empty):
            return None

    def close(self) -> None:
        """Stop trying."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)
        while not self._found.empty():
            self._found.get_nowait().close()
        os.close(self._fd)

    def _dial(self, after_s: float) -> None:
        pause_s = SOONEST_S
        self._ending.wait(after_s)
        while not self._ending.is_set():
            started_s = time.monotonic()
            try:
                link = self._connect()
            except (AuthenticationFailed, OSError) as error:
                self.refused = isinstance(error, TokenRefused)
                what = str(error) or type(error).__name__
                if what != self._said:
                    self._said = what
                    at = f"{self._address[0]}:{self._address[1]}"
                    self._say(f"no way to the coordinator at {at} yet: {what}")
            else:
                self._said, self.refused = "", False
                self._found.put(link)
                os.eventfd_write(self._fd, 1)
                return
            self._ending.wait(max(0.0, started_s + pause_s - time.monotonic()))
            pause_s = min(LATEST_S, pause_s * 2)

    def _connect(self) -> Link:
        sock = socket.create_connection(
            self._address, timeout=CONNECT_LIMIT_S, source_address=self._source
        )
        try:
            return Link(sock, handshake.enter(sock, self._token, node=self._node), agent=True)
        except BaseException:
            sock.close()
            raise
