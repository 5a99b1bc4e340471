"""Messages of the keepers, some of which a descriptor or raw bytes follow.

Over a unix socket within a node, whose ends know each other's user id from the kernel; over TCP
between nodes, where both ends prove that they know the run's token (``recovery.transport.auth``).
The data that follow are neither encrypted nor signed: checksums find corruption, not an attacker in
the network.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from msgspec import field

from trainchaos.recovery.checkpoint.memory.header import VERSION, Header, Key
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import Closed, Message, MessageError, Record, parser

MAX_MESSAGE = 64 << 20
HELLO: dict[str, Any] = {"purpose": "keepers", "version": VERSION, "limit_s": 5.0}
"""How keepers authenticate to each other; see ``recovery.transport.auth``."""
LOOK_MS = 50
_PEER = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class Refusal(MessageError):
    """A request is refused; says why, and what would help."""


class Offer(Message):
    """From a rank, with the descriptor of the data: keep this."""

    header: Header


class Put(Message):
    """From a keeper, which also reports what it holds; the data follow: keep a copy of this."""

    note: Note
    header: Header


class Note(Record):
    """The keeper of ``node`` holds ``held``; ``version``: higher than in any earlier note; ``on``:
    nodes that the receiver passes it on to, in the order of the ring.
    """

    node: int
    version: int
    held: tuple[Key, ...]
    on: tuple[int, ...] = ()


class Notes(Message):
    """From a keeper, over a connection that stays open: what some keepers hold now."""

    notes: tuple[Note, ...]


class Ask(Message):
    """List what is held: by this keeper, or (from a rank) by all that can be reached."""


class Fetch(Message):
    """Request for a part: the descriptor goes to a rank, the data to a keeper."""

    key: Key


class Forget(Message):
    """Release what generations before ``before`` saved after ``step``, here and everywhere, and
    accept no more of it: the state may have been corrupted before that was noticed. The answer
    names what was released here.
    """

    step: int
    before: int


class Kept(Message):
    """Done. ``held``: keys that are held now, or that were released; ``version``: as in ``Note``,
    in an answer to a keeper; ``released``: buffers of this seat that may be used again; ``copies``:
    other nodes that hold it; ``alone``: why there is no copy.
    """

    held: tuple[Key, ...] = ()
    version: int = 0
    released: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    alone: str = ""


class Refused(Message):
    """In place of another answer: the request is refused, and nothing was changed."""

    reason: str


class Held(Message):
    """Keys by node; ``lost``: nodes that did not answer, and why."""

    nodes: dict[int, tuple[Key, ...]]
    lost: dict[int, str] = field(default_factory=dict)


class Coming(Message):
    """To a rank that waits for the part: it is being fetched; another answer follows."""


class Found(Message):
    """The part follows."""

    header: Header


Request = Offer | Put | Notes | Ask | Fetch | Forget
_ASKS, _ANSWERS = parser(Request), parser(Kept | Refused | Held | Coming | Found)
_A = TypeVar("_A", Kept, Held, Found)


def receive_ask(sock: socket.socket, *, limit_s: float) -> tuple[Request, int | None] | None:
    """A request and the descriptor that came with it, which the caller closes; None: the other side
    closed. Raises MessageError, OSError.
    """
    try:
        return _receive(sock, _ASKS, limit_s)
    except Closed:
        return None


def receive_answer(
    sock: socket.socket,
    kind: type[_A],
    *,
    limit_s: float,
    coming: Callable[[], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[_A, int | None]:
    """An answer of this kind and the descriptor that came with it, which the caller closes.
    ``coming``: called for each ``Coming`` before it, and ``check`` meanwhile, which may raise.
    Raises Refusal, MessageError, OSError.
    """
    while True:
        if coming is not None:
            _await(sock, limit_s, check)
        answer, fd = _receive(sock, _ANSWERS, limit_s)
        if isinstance(answer, kind):
            return answer, fd
        if fd is not None:
            os.close(fd)
        if isinstance(answer, Refused):
            raise Refusal(answer.reason)
        if not isinstance(answer, Coming) or coming is None:
            raise MessageError(f"{type(answer).__name__} where {kind.__name__} was expected")
        coming()


def _await(sock: socket.socket, limit_s: float, check: Callable[[], None]) -> None:
    """Wait for an answer to begin. Raises TimeoutError, and what ``check`` raises."""
    deadline_s = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(LOOK_MS):
        check()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"nothing came within {limit_s:g} s")


def _receive(
    sock: socket.socket, parse: Callable[[bytes], Any], limit_s: float
) -> tuple[Any, int | None]:
    """One message, within ``limit_s``, and a descriptor if one came."""
    fds: list[int] = []
    until_s = time.monotonic() + limit_s
    sock.settimeout(limit_s)
    local = sock.family == socket.AF_UNIX
    try:
        message = stream.receive(sock, parse, MAX_MESSAGE, until_s, fds=fds if local else None)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds[0] if fds else None


class Line:
    """A connection that is kept: one request at a time, over a new one where the other side has
    closed it or was replaced since. ``connect``: makes one, raises OSError; ``check``: see
    ``receive_answer``.
    """

    def __init__(
        self, connect: Callable[[], socket.socket], check: Callable[[], None] = lambda: None
    ) -> None:
        self._connect = connect
        self._check = check
        self._sock: socket.socket | None = None

    def ask(
        self,
        message: Message,
        kind: type[_A],
        *,
        limit_s: float,
        fds: Sequence[int] = (),
        coming: Callable[[], None] | None = None,
    ) -> tuple[_A, int | None]:
        """See ``receive_answer``. After an error the connection is closed: an answer may still
        arrive, which must not be taken for that of the next request.
        """
        for fresh in [True] if self._sock is None else [False, True]:
            try:
                sock = self._sock = self._sock or self._connect()
                sock.settimeout(limit_s)
                stream.send(sock, message, fds)
                return receive_answer(sock, kind, limit_s=limit_s, coming=coming, check=self._check)
            except Refusal:
                raise
            except (BrokenPipeError, ConnectionResetError):
                self.close()
                if fresh:
                    raise
            except BaseException:
                self.close()
                raise
        raise AssertionError("a fresh connection answers or raises")

    def close(self) -> None:
        """End the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def send_file(sock: socket.socket, fd: int, size: int, *, limit_s: float) -> None:
    """Send the first ``size`` bytes of a file; ``limit_s``: longest wait for the other side to take
    some.

    Raises OSError.
    """
    if size:
        sock.settimeout(limit_s)
        with open(fd, "rb", closefd=False) as data:
            sock.sendfile(data, 0, size)


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket is of this user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(raw)[1] == os.getuid())
