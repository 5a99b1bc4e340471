"""The keepers of the other nodes, as one keeper sees them: requests, each over a short connection,
and announcements of what is held, over few connections that stay.

Announcements go along a tree. The others form a ring after the sender. It sends to those 1, 2, 4,
8 ... places on, each of which passes the note on, in the same way, to all before the next of these:
of n keepers each receives it once, after log2(n) hops at the most, and each only ever sends to
log2(n) others. Notes that wait for the same keeper travel together, and only the newest from each.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from msgspec import structs

from trainchaos.recovery.checkpoint.memory import protocol
from trainchaos.recovery.checkpoint.memory.header import Header, Key, MemoryFile, create
from trainchaos.recovery.checkpoint.memory.keeper_store import HeldPart
from trainchaos.recovery.checkpoint.memory.protocol import (
    Ask,
    Fetch,
    Forget,
    Found,
    Kept,
    Line,
    Note,
    Notes,
    Put,
    Refusal,
    receive_answer,
)
from trainchaos.recovery.transport import auth, stream
from trainchaos.recovery.transport.stream import MessageError

CONNECT_LIMIT_S = 2.0
ASK_LIMIT_S = 2.0
SEND_LIMIT_S = 10.0  # for the other side to take or send some more bytes, not all of them
# a node that did not answer in time is not asked again for this long: each save would wait for it
SHUN_S = 10.0
AT_ONCE = 16  # nodes that are asked
MIN_RATE = 10e6  # bytes/s; a transfer slower than this is given up
RECEIVE_BYTES = 4 << 20  # between two signs of progress

Address = tuple[str, int]


def transfer_limit_s(size: int) -> float:
    """Time limit for a transfer of that many bytes."""
    return SEND_LIMIT_S + size / MIN_RATE


class Peers:
    """Thread-safe. ``node``: whose view this is; ``token``: of the run."""

    def __init__(self, node: int, token: bytes, addresses: Mapping[int, Address]) -> None:
        self._node = node
        self._token = token
        self._addresses = dict(addresses)
        self._shunned: dict[int, float] = {}  # node -> until when
        self._lock = threading.Lock()

    def know(self, addresses: Mapping[int, Address]) -> list[int]:
        """Note the addresses of all keepers; returns the new nodes, and those that are gone."""
        with self._lock:
            before, self._addresses = self._addresses, dict(addresses)
            self._shunned = {}
        return [n for n in sorted(before.keys() | addresses) if before.get(n) != addresses.get(n)]

    @property
    def addresses(self) -> dict[int, Address]:
        """Addresses of the other keepers."""
        with self._lock:
            return dict(self._addresses)

    def ring(self) -> list[int]:
        """All other nodes, from the next one on, which holds copies of this one's parts."""
        return sorted(set(self.addresses) - {self._node}, key=lambda n: (n < self._node, n))

    def ask_all(self, ask: Ask | Forget) -> tuple[dict[int, tuple[Key, ...]], dict[int, str]]:
        """The keys that each answers, and which do not and why; all are asked at once."""

        def answer(node: int) -> tuple[Key, ...] | str:
            try:
                with self._connect(node, restoring=isinstance(ask, Ask)) as sock:
                    stream.send(sock, ask)
                    return receive_answer(sock, Kept, limit_s=ASK_LIMIT_S)[0].held
            except (OSError, MessageError) as error:
                return str(error) or type(error).__name__

        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            nodes = self.ring()
            answers = dict(zip(nodes, pool.map(answer, nodes), strict=True))
        held = {node: keys for node, keys in answers.items() if not isinstance(keys, str)}
        return held, {node: why for node, why in answers.items() if isinstance(why, str)}

    def put(self, node: int, entry: HeldPart, note: Note) -> Kept:
        """Send a copy, and report what is held here. Raises MessageError when it is refused,
        OSError.
        """
        header = entry.header
        with self._connect(node) as sock:
            stream.send(sock, Put(note=note, header=header))
            # a full keeper refuses before the data are sent
            receive_answer(sock, Kept, limit_s=ASK_LIMIT_S)
            protocol.send_file(sock, entry.fd, header.bytes, limit_s=SEND_LIMIT_S)
            return receive_answer(sock, Kept, limit_s=transfer_limit_s(header.bytes))[0]

    def fetch(
        self, node: int, key: Key, *, progress: Callable[[], None]
    ) -> tuple[Header, MemoryFile]:
        """Get a part into a memory file of this process, without a time limit as long as bytes
        arrive; the rank that restores it checks it. ``progress``: called as bytes arrive. Raises
        MessageError, OSError, what ``progress`` raises.
        """
        progress()
        with self._connect(node, restoring=True) as sock:
            stream.send(sock, Fetch(key=key))
            header = receive_answer(sock, Found, limit_s=ASK_LIMIT_S)[0].header
            return header, receive_part(sock, header, progress=progress)

    @contextmanager
    def _connect(self, node: int, *, restoring: bool = False) -> Iterator[socket.socket]:
        """``restoring``: connect even to a node that failed a moment ago."""
        try:
            with self.open(node, restoring=restoring) as sock:
                yield sock
        except TimeoutError:
            with self._lock:
                self._shunned[node] = time.monotonic() + SHUN_S
            raise

    def open(self, node: int, *, restoring: bool = False) -> socket.socket:
        """An authenticated connection. Raises MessageError, OSError."""
        with self._lock:
            address = self._addresses.get(node)
            shunned = time.monotonic() < self._shunned.get(node, 0.0)
        if address is None:
            raise ConnectionRefusedError(f"node {node} has no keeper")
        if shunned and not restoring:
            raise ConnectionRefusedError(f"node {node} did not answer in time a moment ago")
        sock = socket.create_connection(address, timeout=CONNECT_LIMIT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            auth.enter(sock, self._token, **protocol.HELLO)
        except BaseException:
            sock.close()
            raise
        return sock


def receive_part(
    sock: socket.socket, header: Header, *, progress: Callable[[], None] | None = None
) -> MemoryFile:
    """Read a part's data into a memory file. ``progress``: wait as long as bytes arrive, with a
    call after each RECEIVE_BYTES; None: wait a limited time for all of them, and check them. Raises
    MessageError, OSError.
    """
    memory = create(header.bytes, name="copy", progress=progress or (lambda: None))
    some = header.bytes if progress is None else RECEIVE_BYTES
    try:
        for start in range(0, header.bytes, some or 1):
            data = memory.data[start : min(start + some, header.bytes)]
            stream.fill(sock, data, time.monotonic() + transfer_limit_s(len(data)))
            if progress is not None:
                progress()
        wrong = header.mismatch(memory.data) if progress is None else None
        if wrong is not None:
            raise Refusal(f"{header.key.label} came damaged: {wrong}")
    except BaseException:
        memory.close()
        raise
    return memory


# ---- announcements


def branches(nodes: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Direct receivers, each with the nodes that it passes the note on to; ``nodes``: in the order
    of the ring.
    """
    start, size = 0, 1
    while start < len(nodes):
        yield nodes[start], tuple(nodes[start + 1 : start + size])
        start, size = start + size, size * 2


class _Receiver:
    """One keeper that gets notes, on a thread of its own, over a connection that stays."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self.line = Line(connect)
        self.waiting: dict[int, Note] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="notes")


class Announcer:
    """Thread-safe. ``heard``: called with a keeper's answer; ``failed``: called with a keeper that
    does not answer, and the reason.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        heard: Callable[[int, Kept], None],
        failed: Callable[[int, Exception], None],
    ) -> None:
        self._peers = peers
        self._heard = heard
        self._failed = failed
        self._receivers: dict[int, _Receiver] = {}
        self._closed = False
        self._lock = threading.Lock()

    def announce(self, note: Note, nodes: Sequence[int]) -> list[Future[None]]:
        """Announce to all of these; done when the direct receivers have it, or cannot get it.
        ``nodes``: by the ring.
        """
        return [self.tell(structs.replace(note, on=rest), head) for head, rest in branches(nodes)]

    def tell(self, note: Note, node: int) -> Future[None]:
        """Send to one keeper."""
        with self._lock:
            if self._closed:
                ended: Future[None] = Future()
                ended.set_result(None)
                return ended
            if node not in self._receivers:
                self._receivers[node] = _Receiver(partial(self._peers.open, node))
            receiver = self._receivers[node]
            waits = receiver.waiting.get(note.node)
            if waits is None or waits.version < note.version:
                receiver.waiting[note.node] = note
            return receiver.thread.submit(self._send, node, receiver)

    def forget(self, nodes: Sequence[int]) -> None:
        """These have other keepers now, or none."""
        with self._lock:
            gone = [self._receivers.pop(node) for node in nodes if node in self._receivers]
        for receiver in gone:
            receiver.thread.submit(receiver.line.close)
            receiver.thread.shutdown(wait=False)

    def close(self) -> None:
        """Stop announcing, after what waits."""
        with self._lock:
            self._closed = True
        self.forget([*self._receivers])

    def _send(self, node: int, receiver: _Receiver) -> None:
        with self._lock:
            notes, receiver.waiting = tuple(receiver.waiting.values()), {}
        if not notes:  # they went with those before
            return
        try:
            answer, _ = receiver.line.ask(Notes(notes=notes), Kept, limit_s=ASK_LIMIT_S)
        except (OSError, MessageError) as error:
            self._failed(node, error)
            for note in notes:  # the nodes it would have passed them on to
                self.announce(note, note.on)
        else:
            self._heard(node, answer)
