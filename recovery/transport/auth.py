"""Two ends of a connection prove to each other that they know the same secret, without sending it.

Challenge and response, HMAC-SHA256 over two fresh random numbers, so that a recorded exchange
cannot be replayed. Each message is a length and a JSON document; everything ends within a bound,
however slow the other side is.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

LIMIT_S = 5.0
MAX_MESSAGE = 1 << 12
CLOSED = "the other side closed before it had said who it is"
LATE = "the other side did not say in time who it is"
_LENGTH = struct.Struct("!I")
_REFUSED = ""  # in place of the server's code, where the client's was wrong


class AuthenticationFailed(Exception):
    """The other side failed to authenticate, or sent garbage. ``node``: the one that it claims to
    be, without proof.
    """

    def __init__(self, why: str, *, node: int | None = None) -> None:
        super().__init__(why)
        self.node = node


class TokenRefused(AuthenticationFailed):
    """The server says that the token is not its own."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Challenge(_Message):
    version: int
    nonce: str = Field(min_length=32, max_length=128)


class _Response(_Message):
    version: int
    nonce: str = Field(min_length=32, max_length=128)
    mac: str
    node: int | None = Field(default=None, ge=0)


class _Answer(_Message):
    mac: str


_M = TypeVar("_M", bound=_Message)


class Admitting:
    """The server's side of one connection, which never waits: ``first`` is to be sent, then what
    comes is to be taken, ``wanted`` bytes at most at a time, until there is a ``key``, which only
    these two have and for this connection alone, or a ``refusal``. ``purpose``, ``version``: of the
    protocol that follows.
    """

    def __init__(self, token: bytes, *, purpose: str, version: int) -> None:
        self._token, self._purpose, self._version = token, purpose, version
        self._nonce = secrets.token_hex(32)
        self._size: int | None = None
        self._data = b""
        self.first = _framed(_Challenge(version=version, nonce=self._nonce))
        self.key: bytes | None = None
        self.refusal: AuthenticationFailed | None = None

    @property
    def wanted(self) -> int:
        """How many bytes of its message are still to come."""
        return (_LENGTH.size if self._size is None else self._size) - len(self._data)

    def take(self, data: bytes) -> bytes:
        """Go on with what came; returns what is to be sent. Raises AuthenticationFailed, also where
        the other side has closed the connection and nothing came.
        """
        if not data:
            raise AuthenticationFailed(CLOSED)
        self._data += data
        if self.wanted:
            return b""
        if self._size is None:
            self._size, self._data = _size(self._data), b""
            return b"" if self._size else self._judge(b"")
        return self._judge(self._data)

    def _judge(self, body: bytes) -> bytes:
        response = _parsed(_Response, body)
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
            return _framed(_Answer(mac=_REFUSED))
        self.key = bytes.fromhex(_mac(self._token, self._purpose, "key", mine, its))
        return _framed(_Answer(mac=_mac(self._token, self._purpose, "server", its, mine)))


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
        answer = side.take(_exactly(sock, side.wanted, until_s))
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
    _send(sock, _framed(_Response(version=version, nonce=mine, mac=mac, node=named)), until_s)
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


def _framed(message: BaseModel) -> bytes:
    body = message.model_dump_json(exclude_none=True).encode()
    return _LENGTH.pack(len(body)) + body


def _size(head: bytes) -> int:
    size: int = _LENGTH.unpack(head)[0]
    if size > MAX_MESSAGE:
        raise AuthenticationFailed(f"a message of {size} bytes, over {MAX_MESSAGE}")
    return size


def _parsed(kind: type[_M], body: bytes) -> _M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise AuthenticationFailed(
            f"not a message: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error


def _send(sock: socket.socket, said: bytes, until_s: float) -> None:
    sock.settimeout(_left_s(until_s))
    sock.sendall(said)


def _receive(sock: socket.socket, kind: type[_M], until_s: float) -> _M:
    return _parsed(kind, _exactly(sock, _size(_exactly(sock, _LENGTH.size, until_s)), until_s))


def _exactly(sock: socket.socket, size: int, until_s: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_left_s(until_s))
        part = sock.recv(size - len(data))
        if not part:
            raise AuthenticationFailed(CLOSED)
        data += part
    return data


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(LATE)
    return left_s
