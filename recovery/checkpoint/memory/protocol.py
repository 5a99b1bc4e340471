"""Messages of the keepers: a length, a JSON document, and for some a descriptor or raw bytes after
it.

Over a unix socket within a node, whose ends know each other's user id from the kernel; over TCP
between nodes, where both ends prove that they know the run's token (``recovery.transport.auth``).
The data that follow are neither encrypted nor signed: checksums find corruption, not an attacker in
the network.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from trainchaos.recovery.checkpoint.memory.header import VERSION, Header, Key
from trainchaos.recovery.transport import auth
from trainchaos.recovery.transport.auth import AuthenticationFailed

MAX_MESSAGE = 64 << 20
HELLO_LIMIT_S = 5.0
_LENGTH = struct.Struct("!I")
_PEER = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class ProtocolError(Exception):
    """The other side sent an unknown message, or is not the expected one."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Offer(_Message):
    """From a rank, with the descriptor of the data: keep this."""

    ask: Literal["offer"] = "offer"
    header: Header


class Put(_Message):
    """From a keeper, which also reports what it holds; the data follow: keep a copy of this."""

    ask: Literal["put"] = "put"
    note: Note
    header: Header


class Note(_Message):
    """The keeper of ``node`` holds ``held``; ``version``: higher than in any earlier note; ``on``:
    nodes that the receiver passes it on to, in the order of the ring.
    """

    node: int
    version: int
    held: tuple[Key, ...]
    on: tuple[int, ...] = ()


class Notes(_Message):
    """From a keeper, over a connection that stays open: what some keepers hold now."""

    ask: Literal["notes"] = "notes"
    notes: tuple[Note, ...]


class Ask(_Message):
    """List what is held: by this keeper, or (from a rank) by all that can be reached."""

    ask: Literal["list"] = "list"


class Fetch(_Message):
    """Request for a part: the descriptor goes to a rank, the data to a keeper."""

    ask: Literal["fetch"] = "fetch"
    key: Key


class Forget(_Message):
    """Release what generations before ``before`` saved after ``step``, here and everywhere, and
    accept no more of it: the state may have been corrupted before that was noticed. The answer
    names what was released here.
    """

    ask: Literal["forget"] = "forget"
    step: int
    before: int


class Kept(_Message):
    """The part is kept. ``released``: buffers of this seat that may be used again; ``copies``:
    other nodes that hold it; ``alone``: why there is no copy; ``version``: as in ``Note``, in an
    answer to a keeper.
    """

    answer: Literal["kept"] = "kept"
    held: tuple[Key, ...] = ()
    version: int = 0
    released: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    alone: str = ""


class Refused(_Message):
    """The request is refused, and nothing was changed."""

    answer: Literal["refused"] = "refused"
    reason: str


class Held(_Message):
    """Keys by node; ``lost``: nodes that did not answer, and why."""

    answer: Literal["held"] = "held"
    nodes: dict[int, tuple[Key, ...]]
    lost: dict[int, str] = {}


class Coming(_Message):
    """To a rank that waits for the part: it is being fetched; another answer follows."""

    answer: Literal["coming"] = "coming"


class Found(_Message):
    """The part follows."""

    answer: Literal["found"] = "found"
    header: Header


Request = Offer | Put | Notes | Ask | Fetch | Forget
Answer = Kept | Refused | Held | Coming | Found
_ASKS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="ask")])
_ANSWERS: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="answer")])


def send(sock: socket.socket, message: BaseModel, fds: Sequence[int] = ()) -> None:
    """Send one message, with descriptors (unix sockets only). Raises OSError."""
    body = message.model_dump_json().encode()
    if fds:  # with the first byte, so that they arrive with their message
        socket.send_fds(sock, [_LENGTH.pack(len(body))], list(fds))
    else:
        sock.sendall(_LENGTH.pack(len(body)))
    sock.sendall(body)


def receive_ask(sock: socket.socket, *, limit_s: float) -> tuple[Request, int | None] | None:
    """A request and the descriptor that came with it, which the caller closes; None: the other side
    closed.

    Raises ProtocolError, OSError.
    """
    got = _receive(sock, limit_s, MAX_MESSAGE)
    return None if got is None else (_parse(_ASKS, got[0], got[1]), got[1])


def receive_answer(sock: socket.socket, *, limit_s: float) -> tuple[Answer, int | None]:
    """An answer and the descriptor that came with it, which the caller closes. Raises
    ProtocolError, OSError.
    """
    got = _receive(sock, limit_s, MAX_MESSAGE)
    if got is None:
        raise ConnectionResetError("the keeper closed the connection")
    return _parse(_ANSWERS, got[0], got[1]), got[1]


def receive_into(sock: socket.socket, data: memoryview, *, limit_s: float) -> None:
    """Fill ``data``. Raises OSError, also when the other side ends before."""
    deadline_s = time.monotonic() + limit_s
    done = 0
    while done < len(data):
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        count = sock.recv_into(data[done:])
        if not count:
            raise ConnectionResetError(f"the other side ended after {done} of {len(data)} bytes")
        done += count


def send_file(sock: socket.socket, fd: int, size: int, *, limit_s: float) -> None:
    """Send the first ``size`` bytes of a file; ``limit_s``: longest wait for the other side to take
    some.

    Raises OSError.
    """
    if size:
        sock.settimeout(limit_s)
        with open(fd, "rb", closefd=False) as data:
            sock.sendfile(data, 0, size)


def admit(sock: socket.socket, token: bytes) -> None:
    """As the server: let the client authenticate, then do so too. Raises ProtocolError, OSError."""
    _prove(auth.admit, sock, token)


def enter(sock: socket.socket, token: bytes) -> None:
    """As the client: authenticate, and have the server do so. Raises ProtocolError, OSError."""
    _prove(auth.enter, sock, token)


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket is of this user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(raw)[1] == os.getuid())


def _prove(side: Callable[..., bytes], sock: socket.socket, token: bytes) -> None:
    try:
        side(sock, token, purpose="keepers", version=VERSION, limit_s=HELLO_LIMIT_S)
    except AuthenticationFailed as error:
        raise ProtocolError(str(error)) from error


def _parse(adapter: TypeAdapter[Any], body: bytes, fd: int | None) -> Any:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        if fd is not None:
            os.close(fd)
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProtocolError(f"not a message: {where}: {first['msg']}") from error


def _receive(sock: socket.socket, limit_s: float, largest: int) -> tuple[bytes, int | None] | None:
    """One document, within ``limit_s``, and a descriptor if one came."""
    deadline_s = time.monotonic() + limit_s
    sock.settimeout(limit_s)
    if sock.family == socket.AF_UNIX:
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
    else:
        head, fds = sock.recv(_LENGTH.size), []
    fd = fds[0] if fds else None
    if not head:
        return None
    try:
        rest = bytearray(_LENGTH.size - len(head))
        receive_into(sock, memoryview(rest), limit_s=max(0.001, deadline_s - time.monotonic()))
        (size,) = _LENGTH.unpack(head + rest)
        if size > largest:
            raise ProtocolError(f"a message of {size} bytes, over {largest}")
        body = bytearray(size)
        receive_into(sock, memoryview(body), limit_s=max(0.001, deadline_s - time.monotonic()))
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    return bytes(body), fd
