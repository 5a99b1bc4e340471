"""Messages that a third party cannot forge, repeat or reorder: after the proof of the token, each
carries a code over its number and itself, with a key used only for this connection and direction.

Nothing is encrypted: an eavesdropper on the network can read messages, but cannot send any.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct

from trainchaos.recovery.nodes.link.protocol import VERSION
from trainchaos.recovery.transport import auth
from trainchaos.recovery.transport.stream import MessageError

PURPOSE = "agents"
CODE = 16  # bytes of each message's code
_NUMBER = struct.Struct("!Q")


def admitting(token: bytes) -> auth.Admitting:
    """The coordinator's side of a connection that an agent opened."""
    return auth.Admitting(token, purpose=PURPOSE, version=VERSION)


def enter(
    sock: socket.socket,
    token: bytes,
    *,
    node: int | None = None,
    limit_s: float = auth.LIMIT_S,
) -> bytes:
    """Authenticate as the agent; returns the connection's key. See ``recovery.transport.auth``.
    Raises TokenRefused, AuthenticationFailed, OSError.
    """
    return auth.enter(sock, token, purpose=PURPOSE, version=VERSION, node=node, limit_s=limit_s)


def seals(key: bytes, *, agent: bool) -> tuple[Seal, Seal]:
    """Of what one end sends and receives. ``agent``: whether it is the agent's."""
    from_agent, to_agent = (
        Seal(hmac.digest(key, way, hashlib.sha256)) for way in (b"from the agent", b"to the agent")
    )
    return (from_agent, to_agent) if agent else (to_agent, from_agent)


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
