"""Messages over stream sockets: a length, and a JSON document that says of which kind it is.

Supervisor and ranks, coordinator and agents, keepers, live spares and the link proxy speak it; each
protocol module only lists its messages. Typed, bounded in size, and nothing is unpickled.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import msgspec
from pydantic import BaseModel

LENGTH = struct.Struct("!I")
_T = TypeVar("_T")


class MessageError(Exception):
    """The other side sent something that is not a message."""


class Closed(ConnectionResetError):
    """The process at the other end closed the connection, or ended; a reset raises another
    error.
    """


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class _Strict(msgspec.StructMeta):
    """msgspec hands on neither ``frozen`` to a type checker nor ``kw_only`` to a subclass."""

    def __new__(cls, *args: Any, **config: Any) -> Any:
        config = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True, **config}
        return super().__new__(cls, *args, **config)


class Record(msgspec.Struct, metaclass=_Strict):
    """Base of what is a part of messages."""


class Message(Record, omit_defaults=True, tag=True):
    """Base of all messages: the name of its class is its kind, in the field ``type``."""


def _plain(value: object) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    for plain in (str, int, float):  # subclasses, such as torch's version and numpy's numbers
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _model(kind: type[Any], value: Any) -> Any:
    if issubclass(kind, BaseModel):
        return kind.model_validate(value)
    raise TypeError(f"{kind.__name__} cannot be received")


encoded: Callable[[Any], bytes] = msgspec.json.Encoder(enc_hook=_plain).encode
"""A message without its length."""


def framed(document: bytes) -> bytes:
    """A document with its length."""
    return LENGTH.pack(len(document)) + document


def packed(message: Record) -> bytes:
    """A message as it is sent."""
    return framed(encoded(message))


def parser(kind: Any) -> Callable[[bytes], Any]:
    """Reads documents of a kind of message, or of a union of kinds; it raises MessageError."""
    decode = msgspec.json.Decoder(kind, dec_hook=_model).decode

    def parse(document: bytes) -> Any:
        try:
            return decode(document)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MessageError(f"not a message: {error}") from error

    return parse


class Incoming:
    """Cuts what comes from a stream into documents of at most ``longest`` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._data = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """Documents that are complete with these bytes. Raises MessageError."""
        self._data += data
        complete, at = [], 0
        while len(self._data) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._data, at)
            _refuse_long(size, self._longest)
            end = at + LENGTH.size + size
            if len(self._data) < end:
                break
            complete.append(bytes(self._data[at + LENGTH.size : end]))
            at = end
        del self._data[:at]
        return complete


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send a message, with descriptors (unix sockets only). Raises OSError."""
    data = packed(message)
    if fds:  # with the first bytes, so that they arrive with their message
        socket.send_fds(sock, [data[: LENGTH.size]], list(fds))
        data = data[LENGTH.size :]
    sock.sendall(data)


def receive(
    sock: socket.socket,
    parse: Callable[[bytes], _T],
    longest: int,
    until_s: float | None = None,
    progress: Callable[[], None] | None = None,
    fds: list[int] | None = None,
) -> _T:
    """The next message; ``until_s``, ``progress``: as in ``fill``; ``fds``: takes a descriptor that
    comes with it (unix sockets only). Raises MessageError, OSError.
    """
    head, came = bytearray(LENGTH.size), 0
    if fds is not None:
        first, with_it, _, _ = socket.recv_fds(sock, LENGTH.size, 1)
        fds += with_it
        came = len(first)
        head[:came] = first
        if not came:
            raise Closed("the other side closed the connection")
    fill(sock, memoryview(head)[came:], until_s, progress)
    (size,) = LENGTH.unpack(head)
    _refuse_long(size, longest)
    document = bytearray(size)
    fill(sock, memoryview(document), until_s, progress)
    return parse(bytes(document))


def fill(
    sock: socket.socket,
    into: memoryview,
    until_s: float | None = None,
    progress: Callable[[], None] | None = None,
) -> None:
    """Receive exactly so many bytes, by a time of ``time.monotonic`` or, without one, each part
    within the socket's timeout. ``progress``: called after each part. Raises OSError (Closed: the
    other side closed).
    """
    done = 0
    while done < into.nbytes:
        if until_s is not None:
            if (left_s := until_s - time.monotonic()) <= 0:
                raise TimeoutError("the other side was silent for too long")
            sock.settimeout(left_s)
        count = sock.recv_into(into[done:])
        if not count:
            raise Closed(f"the other side ended after {done} of {into.nbytes} bytes")
        done += count
        if progress is not None:
            progress()


def _refuse_long(size: int, longest: int) -> None:
    if size > longest:
        raise MessageError(f"a message of {size} bytes, over {longest}")
