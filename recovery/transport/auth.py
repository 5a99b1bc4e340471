"""Two ends of a connection prove to each other that they know the same secret, without sending it.

Challenge and response, HMAC-SHA256 over two fresh random numbers, against replay, within a bound.
These messages have no kind and never change: another version is refused by name.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, TypeVar

from msgspec import Meta

from trainchaos.recovery.transport.stream import (
    Closed,
    Incoming,
    MessageError,
    Record,
    packed,
    parser,
    receive,
)

LIMIT_S = 5.0
MAX_MESSAGE = 1 << 12
CLOSED = "the other side closed before it had said who it is"
LATE = "the other side did not say in time who it is"
_REFUSED = ""  # in place of the server's code, where the client's was wrong


class AuthenticationFailed(MessageError):
    """The other side failed to authenticate, or sent garbage. ``node``: the one that it claims to
    be, without proof.
    """

    def __init__(self, why: str, *, node: int | None = None) -> None:
        super().__init__(why)
        self.node = node


class TokenRefused(AuthenticationFailed):
    """The server says that the token is not its own."""


_Nonce = Annotated[str, Meta(min_length=32, max_length=128)]
_T = TypeVar("_T")


class _Challenge(Record, omit_defaults=True):
    version: int
    nonce: _Nonce


class _Response(Record, omit_defaults=True):
    version: int
    nonce: _Nonce
    mac: str
    node: Annotated[int, Meta(ge=0)] | None = None


class _Answer(Record, omit_defaults=True):
    mac: str


_RESPONSE: Callable[[bytes], _Response] = parser(_Response)


class Admitting:
    """The server's side of one connection, which never waits: ``first`` is to be sent, then what
    comes is to be taken until there is a ``key``, which only these two have and for this connection
    alone, or a ``refusal``. ``purpose``, ``version``: of the protocol that follows.
    """

    def __init__(self, token: bytes, *, purpose: str, version: int) -> None:
        self._token, self._purpose, self._version = token, purpose, version
        self._nonce = secrets.token_hex(32)
        self._incoming = Incoming(MAX_MESSAGE)
        self.first = packed(_Challenge(version=version, nonce=self._nonce))
        self.key: bytes | None = None
        self.refusal: AuthenticationFailed | None = None

    def take(self, data: bytes) -> bytes:
        """Go on with what came; returns what is to be sent. Raises AuthenticationFailed, also where
        the other side has closed the connection and nothing came.
        """
        if not data:
            raise AuthenticationFailed(CLOSED)
        documents = _authentic(lambda: self._incoming.take(data))
        return self._judge(_authentic(lambda: _RESPONSE(documents[0]))) if documents else b""

    def _judge(self, response: _Response) -> bytes:
        if response.version != self._version:
            raise AuthenticationFailed(
                f"the other side speaks version {response.version}, not {self._version}: run the"
                " same software",
                node=response.node,
            )
        mine, its = self._nonce, response.nonce
        due = _mac(self._token, self._purpose, "client", mine, its)
        if not hmac.compare_digest(response.mac.encode(), due.encode()):
            self.refusal = AuthenticationFailed(
                "the other side does not know the run's token", node=response.node
            )
            return packed(_Answer(mac=_REFUSED))
        self.key = bytes.fromhex(_mac(self._token, self._purpose, "key", mine, its))
        return packed(_Answer(mac=_mac(self._token, self._purpose, "server", its, mine)))


def admit(
    sock: socket.socket, token: bytes, *, purpose: str, version: int, limit_s: float = LIMIT_S
) -> bytes:
    """As the server: let the client authenticate, then do so too; see ``Admitting``. Raises
    AuthenticationFailed, OSError.
    """
    until_s = time.monotonic() + limit_s
    side = Admitting(token, purpose=purpose, version=version)
    _send(sock, side.first, until_s)
    while side.key is None:
        sock.settimeout(_left_s(until_s))
        answer = side.take(sock.recv(MAX_MESSAGE))
        if side.refusal is not None:
            with suppress(OSError):
                _send(sock, answer, until_s)
            raise side.refusal
        _send(sock, answer, until_s)
    return side.key


def enter(
    sock: socket.socket,
    token: bytes,
    *,
    purpose: str,
    version: int,
    node: int | None = None,
    limit_s: float = LIMIT_S,
) -> bytes:
    """As the client: authenticate, and have the server do so; as ``admit``. ``node``: which one
    this is, for the server's messages alone. Raises TokenRefused, AuthenticationFailed, OSError.
    """
    until_s = time.monotonic() + limit_s
    challenge = _receive(sock, _Challenge, until_s)
    mine, its = secrets.token_hex(32), challenge.nonce
    mac = _mac(token, purpose, "client", its, mine)
    named = node if challenge.version == version else None  # another version may not know the field
    _send(sock, packed(_Response(version=version, nonce=mine, mac=mac, node=named)), until_s)
    if challenge.version != version:
        raise AuthenticationFailed(
            f"the other side speaks version {challenge.version}, not {version}: run the same"
            " software"
        )
    answer = _receive(sock, _Answer, until_s)
    if answer.mac == _REFUSED:
        raise TokenRefused("the token was refused")
    if not hmac.compare_digest(
        answer.mac.encode(), _mac(token, purpose, "server", mine, its).encode()
    ):
        raise AuthenticationFailed("the other side does not know the run's token")
    return bytes.fromhex(_mac(token, purpose, "key", its, mine))


def _mac(token: bytes, *words: str) -> str:
    return hmac.new(token, "|".join(words).encode(), hashlib.sha256).hexdigest()


def _send(sock: socket.socket, data: bytes, until_s: float) -> None:
    sock.settimeout(_left_s(until_s))
    sock.sendall(data)


def _receive(sock: socket.socket, kind: type[_T], until_s: float) -> _T:
    read: Callable[[bytes], _T] = parser(kind)
    return _authentic(lambda: receive(sock, read, MAX_MESSAGE, until_s))


def _authentic(read: Callable[[], _T]) -> _T:
    """What is read, with errors that say at which stage it was."""
    try:
        return read()
    except MessageError as error:
        raise AuthenticationFailed(str(error)) from error
    except Closed as error:
        raise AuthenticationFailed(CLOSED) from error
    except TimeoutError as error:
        raise TimeoutError(LATE) from error


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(LATE)
    return left_s
