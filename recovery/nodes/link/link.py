"""One connection between a coordinator and an agent, and reliable delivery across connections.

A ``Link`` never blocks: what the other side does not take waits in a buffer that its user watches.
A ``Post`` keeps each frame until the other side confirms it, and sends it again on the next
connection; each frame carries its number in the post (0: it may be lost), so that none is lost,
doubled or reordered.
"""

from __future__ import annotations

import itertools
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainchaos.recovery.nodes.link.handshake import CODE, seals
from trainchaos.recovery.nodes.link.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    LONGEST,
    Parcel,
    Tell,
)
from trainchaos.recovery.transport.stream import (
    Closed,
    Incoming,
    Message,
    MessageError,
    encoded,
    framed,
)

CHUNK = 1 << 18
READ = 1 << 16
"""Bytes read at a time: Python makes room for all of them first. For this many that takes 2 us; for
twice as many the C library maps pages anew each time (M_MMAP_THRESHOLD), which takes 20 us, more
than all else about a message.
"""
FULL = 1 << 18  # bytes that wait in a link's buffer, above which nothing more is added


class Link:
    """``key``: of the handshake; ``agent``: whether this end is the agent's. The socket is
    non-blocking from now on.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, agent: bool) -> None:
        self._sock = sock
        self._sending, self._receiving = seals(key, agent=agent)
        self._parse = FROM_COORDINATOR if agent else FROM_AGENT
        self._out = bytearray()
        self._incoming = Incoming(LONGEST + CODE)
        self.sent_bytes = self.received_bytes = 0
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Descriptor to wait on."""
        return self._sock.fileno()

    @property
    def address(self) -> str:
        """Numeric address of this end."""
        return str(self._sock.getsockname()[0])

    @property
    def waiting(self) -> int:
        """Bytes that the other side has not taken yet."""
        return len(self._out)

    def put(self, frame: Message, *, number: int = 0, got: int = 0) -> None:
        """Queue a frame for ``flush``."""
        parcel = Parcel(number=number, got=got, frame=frame)
        self._out += framed(self._sending.seal(encoded(parcel)))

    def flush(self) -> None:
        """Send what the other side takes now. Raises OSError."""
        while self._out:
            try:
                count = self._sock.send(memoryview(self._out)[:CHUNK])
            except (BlockingIOError, InterruptedError):
                return
            self.sent_bytes += count
            del self._out[:count]

    def take(self) -> list[Parcel[Any]]:
        """Received frames. Raises MessageError, OSError (Closed: the other side closed)."""
        try:
            data = self._sock.recv(READ)
        except (BlockingIOError, InterruptedError):
            return []
        except BrokenPipeError as error:  # it closed, and we wrote to it since
            raise Closed("the other side closed the connection") from error
        return self.took(data)

    def took(self, data: bytes) -> list[Parcel[Any]]:
        """The frames that are complete with these bytes; as ``take``."""
        if not data:
            raise Closed("the other side closed the connection")
        self.received_bytes += len(data)
        documents = self._incoming.take(data)
        return [self._parse(self._receiving.open(document)) for document in documents]

    def reset(self) -> None:
        """Reset the connection: unlike the orderly close when a process ends, so that the other
        side can tell the two apart.
        """
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def close(self) -> None:
        """Close the connection at once, for the other side too."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


Lazy = Callable[[], Message]


class Post:
    """Reliable delivery to one other side, over any number of connections. ``limit``: of frames
    that may wait; ``on_put``: called whenever there is something to send.

    Messages to processes of a node wait for others until the next turn, or until another frame has
    to go, and travel as one.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self.on_put: Callable[[], None] = lambda: None
        self._kept: deque[tuple[int, Message | Lazy, Callable[[], None] | None]] = deque()
        self._numbers = itertools.count(1)
        self._unsent = 0  # number of unsent frames, at the end of the kept ones
        self._open: list[tuple[str, Message]] = []
        self._open_needed = False
        self._needed = 0  # number of the last needed frame
        self.received = 0

    def __len__(self) -> int:
        """Frames that the other side has not confirmed."""
        return len(self._kept)

    @property
    def unsent(self) -> int:
        """Frames that were not sent over the current connection."""
        return self._unsent

    @property
    def full(self) -> bool:
        """Whether more frames wait than ``limit``."""
        return len(self._kept) > self._limit

    @property
    def waits(self) -> bool:
        """Whether a needed message is not confirmed yet."""
        return self._open_needed or (bool(self._kept) and self._kept[0][0] <= self._needed)

    def add(
        self,
        frame: Message | Lazy,
        *,
        then: Callable[[], None] | None = None,
        needed: bool = False,
    ) -> None:
        """Queue a frame, after all queued before it; a function is called for it each time it is
        sent. ``then``: called once the other side has confirmed it; ``needed``: the job cannot
        continue before.
        """
        self._seal()
        self._keep(frame, then, needed=needed)
        self.on_put()

    def tell(self, process: str, message: Message, *, needed: bool = False) -> None:
        """Queue a message to a process."""
        self._open.append((process, message))
        self._open_needed |= needed
        self.on_put()

    def pump(self, link: Link) -> None:
        """Give the link as many frames as it has room for."""
        self._seal()
        while self._unsent and link.waiting < FULL:
            number, frame, _ = self._kept[-self._unsent]
            link.put(
                frame if isinstance(frame, Message) else frame(), number=number, got=self.received
            )
            self._unsent -= 1

    def confirmed(self, number: int) -> None:
        """The other side has everything up to ``number``."""
        while self._kept and self._kept[0][0] <= number:
            _, _, then = self._kept.popleft()
            if then is not None:
                then()
        self._unsent = min(self._unsent, len(self._kept))

    def reconnected(self) -> None:
        """There is a new connection: all unconfirmed frames are sent over it, in order."""
        self._seal()
        self._unsent = len(self._kept)

    def renumber(self) -> None:
        """The other side is a new one: neither side has a frame of the other."""
        self._numbers = itertools.count(1)
        self._kept = deque((next(self._numbers), frame, then) for _, frame, then in self._kept)
        self._unsent, self.received = len(self._kept), 0

    def accept(self, parcel: Parcel[Any]) -> bool:
        """Whether a parcel is new. Raises MessageError when an earlier one is missing."""
        self.confirmed(parcel.got)
        if parcel.number > self.received + 1:
            raise MessageError(f"message {parcel.number} came where {self.received + 1} was due")
        new = parcel.number in (0, self.received + 1)
        self.received = max(self.received, parcel.number)
        return new

    def _keep(
        self,
        frame: Message | Lazy,
        then: Callable[[], None] | None = None,
        *,
        needed: bool = False,
    ) -> None:
        number = next(self._numbers)
        self._kept.append((number, frame, then))
        self._unsent += 1
        self._needed = number if needed else self._needed

    def _seal(self) -> None:
        letters, self._open = self._open, []
        for frame in Tell.of(letters):
            self._keep(frame, needed=self._open_needed)
        self._open_needed = False
