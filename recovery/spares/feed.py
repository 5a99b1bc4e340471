"""One rank's connection to one spare: what is to be sent waits in a bounded queue, and a thread of
its own sends it. The training thread never waits for it.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainchaos.recovery.spares import frames
from trainchaos.recovery.spares.hostcopy import COPY_S, HostCopy
from trainchaos.recovery.spares.standing import pause_steps
from trainchaos.recovery.state.strides import quiet
from trainchaos.recovery.transport.auth import enter
from trainchaos.recovery.transport.stream import MessageError

CONNECT_S = 5.0
SEND_S = 60.0
"""Silence of a spare, in the midst of a frame, after which its rank gives the connection up. Nobody
waits for it: a spare that lags is dropped long before.
"""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A frame that waits to be sent. ``copies``: what its payload is being copied by; ``done``:
    called once it was sent, or will not be.
    """

    header: dict[str, Any]
    copies: Sequence[HostCopy] = ()
    done: Callable[[], None] = quiet


class Feed:
    """Keeps one spare up to date. ``base``: the step from which on steps are offered, and the
    digest of some values of its state; ``last``: that step itself, if its gradients are here still.

    For the training thread: ``offer``, ``wants_state``, ``ended`` ("": it works), ``due``, the step
    after which it may get the whole state, and ``begun``, the last step whose gradients it was
    given.
    """

    def __init__(
        self, spare: str, address: str, *, lag: int, base: tuple[int, str], last: Item | None
    ) -> None:
        self.spare = spare
        self.address = address
        self.ended = ""
        self.differs = False  # the spare has found that its state is another
        self.wants_state = False
        self.due = self._tries = 0
        self.begun = -1
        self._lag = lag
        self._base, self._last = base, last
        self._queue: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"feed-{spare}", daemon=True)
        self._thread.start()

    def later(self, step: int) -> None:
        """The spare has not followed: try again some steps later."""
        self.due = step + pause_steps(self._tries)
        self._tries += 1

    def offer(self, item: Item, *, step: bool = False) -> bool:
        """Send this when all before it is sent. False where it is not: the spare lags by too many
        steps, and gets the whole state later instead of all that waits.
        """
        with self._changed:
            if not self.ended and not self._closing:
                behind = sum(one.header["kind"] == "gradients" for one in self._queue)
                if not step or behind < self._lag:
                    self._queue.append(item)
                    self._changed.notify()
                    return True
        item.done()
        return False

    def start_again(self) -> None:
        """Drop what waits: the spare needs the whole state."""
        with self._changed:
            self.wants_state = True
            self._drop()

    def close(self, *, now: bool = False) -> None:
        """End once what waits is sent; ``now``: without sending it."""
        with self._changed:
            self._closing = True
            if now:
                self._drop()
            self._changed.notify()

    def _drop(self) -> None:
        while self._queue:
            self._queue.popleft().done()

    def _run(self) -> None:
        try:
            address, token = frames.parse(self.address)
            with socket.create_connection(address, timeout=CONNECT_S) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                enter(sock, token, purpose=frames.PURPOSE, version=frames.VERSION)
                sock.settimeout(SEND_S)
                self._begin(sock)
                while (item := self._next()) is not None:
                    self._listen(sock)
                    try:
                        _send(sock, item)
                    finally:
                        item.done()
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
        except (OSError, ValueError, RuntimeError, MessageError) as error:
            why = str(error) or type(error).__name__
        else:
            why = "closed"
        with self._changed:
            self.ended = why
            self._drop()
            if self._last is not None:
                self._last.done()
                self._last = None

    def _begin(self, sock: socket.socket) -> None:
        """Learn what the spare holds, and decide what it needs first."""
        here, (step, digest), last = frames.receive(sock), self._base, self._last
        check = {"kind": "base", "step": step, "digest": digest}
        if here.get("step") == step:
            frames.send(sock, check)
        elif last is not None and here.get("step") == step - 1:
            _send(sock, last)
            frames.send(sock, check)
        else:
            self.start_again()
        if last is not None:
            self._last = None
            last.done()

    def _next(self) -> Item | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _listen(self, sock: socket.socket) -> None:
        """Whether the spare has said that its state is another."""
        while frames.readable(sock, within_s=0):
            if frames.receive(sock)["kind"] == "differs":
                self.differs = True


def _send(sock: socket.socket, item: Item) -> None:
    for copy in item.copies:
        copy.wait(COPY_S)
    frames.send(sock, item.header, [view for copy in item.copies for view in copy.views])
