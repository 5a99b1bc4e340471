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


def admit(
    sock: socket.socket, token: bytes, *, purpose: str, version: int, limit_s: float = LIMIT_S
) -> bytes:
    """As the server: let the client authenticate, then do so too. Returns a key that only these two
    have, for this connection alone. ``purpose``, ``version``: of the protocol that follows. Raises
    AuthenticationFailed, OSError.
    """
    until_s = time.monotonic() + limit_s
    nonce = secrets.token_hex(32)
    _send(sock, _Challenge(version=version, nonce=nonce), until_s)
    response = _receive(sock, _Response, until_s)
    if response.version != version:
        raise AuthenticationFailed(
            f"the other side speaks version {response.version}, not {version}: run the same"
            " software",
            node=response.node,
        )
    mine, its = nonce, response.nonce
    if not hmac.compare_digest(
        response.mac.encode(), _mac(token, purpose, "client", mine, its).encode()
    ):
        with suppress(OSError):
            _send(sock, _Answer(mac=_REFUSED), until_s)
        raise AuthenticationFailed(
            "the other side does not know the run's token", node=response.node
        )
    _send(sock, _Answer(mac=_mac(token, purpose, "server", its, mine)), until_s)
    return bytes.fromhex(_mac(token, purpose, "key", mine, its))


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
    _send(sock, _Response(version=version, nonce=mine, mac=mac, node=named), until_s)
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


def _send(sock: socket.socket, message: BaseModel, until_s: float) -> None:
    body = message.model_dump_json(exclude_none=True).encode()
    sock.settimeout(_left_s(until_s))
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive(sock: socket.socket, kind: type[_M], until_s: float) -> _M:
    (size,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size, until_s))
    if size > MAX_MESSAGE:
        raise AuthenticationFailed(f"a message of {size} bytes, over {MAX_MESSAGE}")
    try:
        return kind.model_validate_json(_exactly(sock, size, until_s))
    except ValidationError as error:
        first = error.errors()[0]
        raise AuthenticationFailed(
            f"not a message: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error


def _exactly(sock: socket.socket, size: int, until_s: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_left_s(until_s))
        part = sock.recv(size - len(data))
        if not part:
            raise AuthenticationFailed("the other side closed before it had said who it is")
        data += part
    return data


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the other side did not say in time who it is")
    return left_s
