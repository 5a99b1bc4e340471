"""Messages that a third party cannot forge, repeat or reorder: after the proof of the token, each
carries a code over its number and itself, with a key used only for this connection and direction.

Nothing is encrypted: an eavesdropper on the network can read messages, but cannot send any.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
from dataclasses import dataclass

from trainchaos.recovery.nodes.link.protocol import VERSION
from trainchaos.recovery.transport import auth
from trainchaos.recovery.transport.auth import (
    LATE,
    LIMIT_S,
    Admitting,
    AuthenticationFailed,
    TokenRefused,
)
from trainchaos.recovery.transport.stream import MessageError

__all__ = [
    "LATE",
    "LIMIT_S",
    "Admitting",
    "AuthenticationFailed",
    "Keys",
    "Seal",
    "TokenRefused",
    "admitted",
    "admitting",
    "enter",
]

CODE = 16  # bytes of each message's code
_NUMBER = struct.Struct("!Q")


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Keys of one connection."""

    sending: bytes
    receiving: bytes


def admitting(token: bytes) -> Admitting:
    """The coordinator's side of a connection that an agent opened."""
    return Admitting(token, purpose="agents", version=VERSION)


def admitted(key: bytes) -> Keys:
    """The coordinator's keys of a connection whose agent is authenticated."""
    return Keys(sending=_derive(key, "to the agent"), receiving=_derive(key, "from the agent"))


def enter(
    sock: socket.socket, token: bytes, *, node: int | None = None, limit_s: float = LIMIT_S
) -> Keys:
    """Authenticate as the agent; see ``recovery.transport.auth.enter``. Raises TokenRefused,
    AuthenticationFailed, OSError.
    """
    key = auth.enter(sock, token, purpose="agents", version=VERSION, node=node, limit_s=limit_s)
    return Keys(sending=_derive(key, "from the agent"), receiving=_derive(key, "to the agent"))


class Seal:
    """One direction of a connection."""

    def __init__(self, key: bytes) -> None:
        # Copied for each message: OpenSSL takes longer to begin a code than to make one.
        self._begun = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        """The next message: its code and its body."""
        self._number += 1
        return self._code(self._number, body) + body

    def open(self, document: bytes) -> bytes:
        """The body of the next message. Raises MessageError."""
        code, body = document[:CODE], document[CODE:]
        if not hmac.compare_digest(code, self._code(self._number + 1, body)):
            raise MessageError(
                "a message without the code that is due: forged, damaged, repeated, out of order,"
                " or of another connection"
            )
        self._number += 1
        return body

    def _code(self, number: int, body: bytes) -> bytes:
        code = self._begun.copy()
        code.update(_NUMBER.pack(number) + body)
        return code.digest()[:CODE]


def _derive(key: bytes, what: str) -> bytes:
    return hmac.digest(key, what.encode(), hashlib.sha256)
