"""Where a command's processes hold for faults: the file that arms points, and the socket to ask at.

The other side is ``chaos.beacon``, in a program that is not ours: the kernel identifies the peer,
lines are bounded, numbers are checked, and a peer that sends anything else is disconnected.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.beacon import VERSION

LINE_LIMIT = 256
CONNECTION_LIMIT = 4096
ANSWER_LIMIT = 200
_VALUE = r"(-|[+-]?(?:nan|inf|[0-9]{1,20}(?:\.[0-9]{0,20})?(?:e[+-]?[0-9]{1,4})?))"
_AT = re.compile(r"at ([0-9]{1,15}) ([0-9]{1,15}) ([a-z]+)")
_DID = re.compile(rf"did ([0-9]{{1,15}}) ([a-z]+) {_VALUE} {_VALUE}")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


@dataclass(frozen=True, kw_only=True)
class PointRequest:
    """A process holds at a point. ``number``: of its request; ``pid``: from the kernel."""

    connection: int
    number: int
    pid: int
    step: int
    name: str


@dataclass(frozen=True, kw_only=True)
class PointDone:
    """A process reports that it has done its order. ``before``, ``after``: values, if it
    sent them.
    """

    connection: int
    step: int
    what: str
    before: float | None
    after: float | None


@dataclass(frozen=True, kw_only=True)
class Disconnected:
    """A connection ended."""

    connection: int


@dataclass(kw_only=True)
class _Connection:
    socket: socket.socket
    pid: int
    rest: bytes = b""


class Points:
    """The points of one arm. ``places``: (step, name), step 0 for every step; none is armed at
    first.

    Raises OSError if the file or the socket cannot be made.
    """

    def __init__(self, path: Path, places: Iterable[tuple[int, str]]) -> None:
        name = f"chaos-points-{secrets.token_hex(12)}"
        text, self._offsets = f"{VERSION} {name}\n", dict[tuple[int, str], int]()
        for place in dict.fromkeys(places):
            self._offsets[place] = len(text)
            text += f"0 {place[0]} {place[1]}\n"
        path.write_text(text)
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._armed: set[tuple[int, str]] = set()
        self._poll = selectors.EpollSelector()
        self._connections: dict[int, _Connection] = {}  # by number: descriptors are used again
        self._count = 0
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._server.bind("\0" + name)  # abstract: no file is left behind
        self._server.listen(128)
        self._poll.register(self._server, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable when there is news."""
        return self._poll.fileno()

    def arm(self, armed: Iterable[tuple[int, str]]) -> None:
        """Make processes hold at these places, and only these. Places not given to the constructor
        are ignored.
        """
        wanted = set(armed) & self._offsets.keys()
        for place in wanted ^ self._armed:
            os.pwrite(self._fd, b"1" if place in wanted else b"0", self._offsets[place])
        self._armed = wanted

    def listen(self) -> list[PointRequest | PointDone | Disconnected]:
        """Messages since the last call, without waiting."""
        found: list[PointRequest | PointDone | Disconnected] = []
        for key, _ in self._poll.select(0):
            if key.data is None:
                self._accept()
            else:
                found += self._read(key.data, self._connections[key.data])
        return found

    def answer(self, connection: int, number: int, word: str) -> None:
        """Release a process that holds; no error if it is gone."""
        known = self._connections.get(connection)
        if known is None:
            return
        line = f"{number} {word}".encode("ascii", "replace")[:ANSWER_LIMIT].replace(b"\n", b" ")
        try:
            known.socket.send(line + b"\n")  # fits: a real beacon's buffer has nothing else in it
        except OSError:  # the next read notices that it is gone
            pass

    def close(self) -> None:
        """Disconnect all processes: those that hold continue."""
        for connection in list(self._connections):
            self._hang_up(connection)
        if self._fd >= 0:
            self._poll.close()
            self._server.close()
            os.close(self._fd)
            self._fd = -1

    def _accept(self) -> None:
        while True:
            try:
                made, _ = self._server.accept()
            except OSError:
                return
            raw = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, uid, _ = _CREDENTIALS.unpack(raw)
            if uid not in (os.getuid(), 0) or len(self._connections) >= CONNECTION_LIMIT:
                made.close()
                continue
            made.setblocking(False)
            self._count += 1
            self._connections[self._count] = _Connection(socket=made, pid=pid)
            self._poll.register(made, selectors.EVENT_READ, self._count)

    def _read(
        self, connection: int, one: _Connection
    ) -> list[PointRequest | PointDone | Disconnected]:
        """Read one connection once; a malformed or overlong line ends it."""
        try:
            data = one.socket.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, one.rest = (one.rest + data).split(b"\n")
        parsed = (parse(connection, one.pid, line) for line in lines)
        known: list[PointRequest | PointDone | Disconnected] = [each for each in parsed if each]
        if not data or len(known) < len(lines) or len(one.rest) > LINE_LIMIT:
            self._hang_up(connection)
            known.append(Disconnected(connection=connection))
        return known

    def _hang_up(self, connection: int) -> None:
        one = self._connections.pop(connection, None)
        if one is not None:
            self._poll.unregister(one.socket)
            one.socket.close()


def parse(connection: int, pid: int, line: bytes) -> PointRequest | PointDone | None:
    """A line of a beacon, or None if it is malformed: ``at number step name`` or ``did step what
    before after``, where a dash stands for no value.
    """
    text = line.decode("ascii", "replace") if len(line) <= LINE_LIMIT else ""
    if at := _AT.fullmatch(text):
        return PointRequest(
            connection=connection, number=int(at[1]), pid=pid, step=int(at[2]), name=at[3]
        )
    if did := _DID.fullmatch(text):
        before, after = (None if value == "-" else float(value) for value in did.group(3, 4))
        return PointDone(
            connection=connection, step=int(did[1]), what=did[2], before=before, after=after
        )
    return None
