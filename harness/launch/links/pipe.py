"""One connection through the proxy: two sockets, and a shaped pipe each way."""

from __future__ import annotations

import contextlib
import math
import socket
from collections import deque

from trainchaos.harness.launch.links.messages import Link
from trainchaos.harness.launch.links.shaping import OPEN, Pacer


class Pipe:
    """Bytes from ``source`` to ``sink``. ``wants_read`` and ``wants_write``: the events it waits
    for.
    """

    def __init__(
        self, link: Link, source: socket.socket, sink: socket.socket, pacer: Pacer
    ) -> None:
        self.link = link
        self.source = source
        self.sink = sink
        self.pacer = pacer
        self.over = False  # the end of the stream has been forwarded
        self._ended = False
        self._full = False
        self._queue: deque[tuple[float, memoryview]] = deque()
        self._held = 0
        self._due_s = math.inf

    def move(self, now_s: float, buffer: bytearray) -> bool:
        """Forward what is due and read what has arrived; False if the connection is broken."""
        try:
            self._send(now_s)
            if not self._ended and self._may_read(now_s):
                self._read(now_s, buffer)
                self._send(now_s)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return False
        if self._ended and not self._queue and not self.over and self.pacer.opens_s(now_s) <= now_s:
            self.over = True
            with contextlib.suppress(OSError):
                self.sink.shutdown(socket.SHUT_WR)
        return True

    def wants_read(self, now_s: float) -> bool:
        """Whether to read arriving bytes now."""
        return not self._ended and self._may_read(now_s)

    @property
    def wants_write(self) -> bool:
        """Whether the sink accepted less than was due."""
        return self._full

    def next_s(self, now_s: float) -> float:
        """Time of its next action if no event comes; infinity: never."""
        opens_s = self.pacer.opens_s(now_s)
        if opens_s > now_s:
            return opens_s
        return self._queue[0][0] if self._queue and not self._full else math.inf

    def _may_read(self, now_s: float) -> bool:
        return (
            self._held < self.pacer.held and not self._full and self.pacer.opens_s(now_s) <= now_s
        )

    def _read(self, now_s: float, buffer: bytearray) -> None:
        size = self.source.recv_into(buffer, min(len(buffer), self.pacer.chunk))
        if not size:
            self._ended = True
            return
        view = memoryview(buffer)[:size]
        if self.pacer.shape == OPEN and not self._queue:  # the common case copies nothing
            try:
                sent = self.sink.send(view)
            except BlockingIOError:
                sent = 0
            if sent == size:
                return
            view, self._full = view[sent:], True
        self._queue.append((self.pacer.release_s(now_s, len(view)), memoryview(bytes(view))))
        self._held += len(view)

    def _send(self, now_s: float) -> None:
        self._full = False
        while self._queue and self._queue[0][0] <= now_s and self.pacer.opens_s(now_s) <= now_s:
            due_s, data = self._queue[0]
            try:
                sent = self.sink.send(data)
            except BlockingIOError:
                self._full = True
                return
            self._held -= sent
            if sent < len(data):
                self._queue[0] = (due_s, data[sent:])
                self._full = True
                return
            self._queue.popleft()
