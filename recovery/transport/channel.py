"""The connection of a supervisor and a rank: messages, one a line, over a stream socket."""

from __future__ import annotations

import socket
import threading
from typing import Any

from pydantic import ValidationError

from trainchaos.recovery.transport.wire import ANY_MESSAGE, Message

MAX_LINE = 1 << 20


class WireError(Exception):
    """The other side sent something that is not a message."""


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
        self._buffer = b""

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self.sock.fileno()

    def send(self, message: Message) -> bool:
        """Send one message; False when the other side is gone or reads nothing: it may have got a
        part.
        """
        try:
            with self._sending:
                self.sock.sendall(message.model_dump_json().encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Any] | None:
        """Read once, return the messages completed by it; None: the other side closed. Raises
        WireError.
        """
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError, TimeoutError):
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if max(len(line) for line in (*lines, self._buffer)) > MAX_LINE:
            raise WireError(f"a message is longer than {MAX_LINE} bytes")
        try:
            return [ANY_MESSAGE.validate_json(line) for line in lines]
        except ValidationError as error:
            raise WireError(f"not a message: {error.errors()[0]['msg']}") from error

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
