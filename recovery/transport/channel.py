"""The connection of a supervisor and a rank."""

from __future__ import annotations

import socket
import threading
from typing import Any

from trainchaos.recovery.transport.stream import Incoming, packed
from trainchaos.recovery.transport.wire import ANY_MESSAGE, Message

LONGEST = 1 << 20


class Channel:
    """One side of a supervisor-rank connection over a stream socket.

    ``send_limit_s``: give up a send after so long; about a hundred messages fit into the buffer of
    a receiver that reads nothing, such as a stopped process.
    """

    def __init__(self, sock: socket.socket, *, send_limit_s: float | None = None) -> None:
        self.sock = sock
        self._sending = threading.Lock()  # a notice is sent by a thread of its own
        if send_limit_s is not None:
            sock.settimeout(send_limit_s)
        self._incoming = Incoming(LONGEST)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False when the other side is gone or reads nothing: it may have got a
        part.
        """
        return self.send_packed(packed(message))

    def send_packed(self, data: bytes) -> bool:
        """``send``, of a message with its length."""
        try:
            with self._sending:
                self.sock.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """Read once, return the messages completed by it; None: the other side closed. Raises
        MessageError.
        """
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return []
        except OSError:
            return None
        return [ANY_MESSAGE(document) for document in self._incoming.take(data)] if data else None

    def close(self) -> None:
        self.sock.close()
