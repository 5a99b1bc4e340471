"""Lines that a third party cannot forge, repeat or reorder: after the proof of the token, each
carries a running number and a code over both, with a key used only for this connection and
direction.

Nothing is encrypted: an eavesdropper on the network can read the lines, but cannot send any.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from dataclasses import dataclass

from trainchaos.recovery.nodes.link.protocol import MAX_LINE, VERSION
from trainchaos.recovery.transport import auth
from trainchaos.recovery.transport.auth import (
    LATE,
    LIMIT_S,
    Admitting,
    AuthenticationFailed,
    TokenRefused,
)

__all__ = [
    "LATE",
    "LIMIT_S",
    "Admitting",
    "AuthenticationFailed",
    "Keys",
    "ProtocolViolation",
    "Seal",
    "TokenRefused",
    "admitted",
    "admitting",
    "enter",
]

CODE = 32  # hexadecimal digits of each line's code: 128 bits
MAX_HEAD = CODE + 24  # of a line: the code, its number, two spaces, the end


class ProtocolViolation(Exception):
    """What came is not a line of the other side, or not the next one: the connection is
    unusable.
    """


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
        # Copied for each line: OpenSSL takes longer to begin a code than to make one.
        self._begun = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        """The next line: its code, its number and its body. ``body`` holds no newline."""
        self._number += 1
        text = b"%d %b" % (self._number, body)
        return b"%b %b\n" % (self._code(text), text)

    def open(self, line: bytes) -> bytes:
        """The body of the next line, without its end. Raises ProtocolViolation."""
        number = self._number + 1
        code, space, text = line.partition(b" ")
        if not space or not hmac.compare_digest(code, self._code(text)):
            raise ProtocolViolation(
                "a line without a valid code: forged, damaged, or of another connection"
            )
        count, _, body = text.partition(b" ")
        if count != b"%d" % number:
            raise ProtocolViolation(
                f"line {count.decode()} came where {number} was due: repeated or out of order"
            )
        if len(body) > MAX_LINE:
            raise ProtocolViolation(f"a line of {len(body)} bytes, over {MAX_LINE}")
        self._number = number
        return body

    def _code(self, text: bytes) -> bytes:
        code = self._begun.copy()
        code.update(text)
        return code.digest()[: CODE // 2].hex().encode()


def _derive(key: bytes, what: str) -> bytes:
    return hmac.digest(key, what.encode(), hashlib.sha256)
