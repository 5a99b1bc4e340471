"""The keepers of the other nodes, as one keeper sees them: a short connection for each request
(announcements have others: ``recovery.checkpoint.memory.announcing``).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from trainchaos.recovery.checkpoint.memory import protocol
from trainchaos.recovery.checkpoint.memory.files import MemoryFile, create, populate
from trainchaos.recovery.checkpoint.memory.header import PIECE_BYTES, Header, Key, mismatch
from trainchaos.recovery.checkpoint.memory.keeper_store import HeldPart
from trainchaos.recovery.checkpoint.memory.protocol import (
    Ask,
    Fetch,
    Forget,
    Found,
    Held,
    Kept,
    Note,
    Put,
)
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import MessageError

CONNECT_LIMIT_S = 2.0
ASK_LIMIT_S = 2.0
SEND_LIMIT_S = 10.0  # for the other side to take or send some more bytes, not all of them
SHUN_S = (
    # a node that did not answer in time is not asked again for this long: each save would wait for
    # it
    10.0
)
AT_ONCE = 16  # nodes that are asked
MIN_RATE = 10e6  # bytes/s; a transfer slower than this is given up

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
        """All other nodes, from the next one on."""
        nodes = self.nodes()
        return [n for n in nodes if n > self._node] + [n for n in nodes if n < self._node]

    def nodes(self) -> list[int]:
        """All other nodes."""
        with self._lock:
            return sorted(set(self._addresses) - {self._node})

    def successor(self) -> int | None:
        """The node that holds copies of this one's parts: the next one in a ring of all; None:
        there is no other.
        """
        return next(iter(self.ring()), None)

    def held(self) -> tuple[dict[int, tuple[Key, ...]], dict[int, str]]:
        """What they hold, and which do not answer and why; all are asked at once."""
        held: dict[int, tuple[Key, ...]] = {}
        lost: dict[int, str] = {}
        for node, answer in self._ask_all(self._ask_held):
            if isinstance(answer, str):
                lost[node] = answer
            else:
                held[node] = answer
        return held, lost

    def put(self, node: int, entry: HeldPart, note: Note) -> Kept:
        """Send a copy, and report what is held here. Raises MessageError when it is refused,
        OSError.
        """
        header = entry.header
        with self._connect(node) as sock:
            stream.send(sock, Put(note=note, header=header))
            # a full keeper refuses before the data are sent
            ready, _ = protocol.receive_answer(sock, limit_s=ASK_LIMIT_S)
            if isinstance(ready, protocol.Refused):
                raise MessageError(ready.reason)
            protocol.send_file(sock, entry.fd, header.bytes, limit_s=SEND_LIMIT_S)
            answer, _ = protocol.receive_answer(sock, limit_s=transfer_limit_s(header.bytes))
        if isinstance(answer, Kept):
            return answer
        raise MessageError(
            answer.reason if isinstance(answer, protocol.Refused) else "not an answer to a copy"
        )

    def forget(self, step: int, before: int) -> tuple[set[Key], dict[int, str]]:
        """Have all release what is doubtful; returns what was released, and which nodes could not
        be reached and why. All are asked at once.
        """
        gone: set[Key] = set()
        lost: dict[int, str] = {}
        for node, answer in self._ask_all(lambda node: self._forget(node, step, before)):
            if isinstance(answer, str):
                lost[node] = answer
            else:
                gone |= set(answer)
        return gone, lost

    def _forget(self, node: int, step: int, before: int) -> tuple[Key, ...]:
        with self._connect(node) as sock:
            stream.send(sock, Forget(step=step, before=before))
            answer, _ = protocol.receive_answer(sock, limit_s=ASK_LIMIT_S)
        if isinstance(answer, Kept):
            return answer.held
        raise MessageError("not an answer")

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
            answer, _ = protocol.receive_answer(sock, limit_s=ASK_LIMIT_S)
            if not isinstance(answer, Found):
                raise MessageError(
                    answer.reason
                    if isinstance(answer, protocol.Refused)
                    else "not an answer to a fetch"
                )
            return answer.header, receive_part(sock, answer.header, progress=progress)

    def _ask_all(
        self, ask: Callable[[int], tuple[Key, ...]]
    ) -> Iterator[tuple[int, tuple[Key, ...] | str]]:
        """Each other node with its answer, or the error."""

        def answer(node: int) -> tuple[Key, ...] | str:
            try:
                return ask(node)
            except (OSError, MessageError) as error:
                return str(error) or type(error).__name__

        if nodes := self.nodes():
            with ThreadPoolExecutor(max_workers=min(AT_ONCE, len(nodes))) as pool:
                yield from zip(nodes, pool.map(answer, nodes), strict=True)

    def _ask_held(self, node: int) -> tuple[Key, ...]:
        with self._connect(node, restoring=True) as sock:
            stream.send(sock, Ask())
            answer, _ = protocol.receive_answer(sock, limit_s=ASK_LIMIT_S)
        if isinstance(answer, Held):
            return answer.nodes.get(node, ())
        raise MessageError("not an answer to a list")

    @contextmanager
    def _connect(self, node: int, *, restoring: bool = False) -> Iterator[socket.socket]:
        """``restoring``: connect even to a node that failed a moment ago."""
        try:
            with self.open(node, restoring=restoring) as sock:
                yield sock
        except TimeoutError:
            self._shun(node)
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
        try:
            sock = socket.create_connection(address, timeout=CONNECT_LIMIT_S)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                protocol.enter(sock, self._token)
            except BaseException:
                sock.close()
                raise
        except TimeoutError:
            self._shun(node)
            raise
        return sock

    def _shun(self, node: int) -> None:
        with self._lock:
            self._shunned[node] = time.monotonic() + SHUN_S


def receive_part(
    sock: socket.socket, header: Header, *, progress: Callable[[], None] | None = None
) -> MemoryFile:
    """Read a part's data into a memory file. ``progress``: wait as long as bytes arrive, with a
    call after each PIECE_BYTES; None: wait a limited time for all of them, and check them. Raises
    MessageError, OSError.
    """
    memory = create(header.bytes, name="copy")
    some = header.bytes if progress is None else PIECE_BYTES
    try:
        populate(memory, progress)
        for start in range(0, header.bytes, some or 1):
            data = memory.data[start : min(start + some, header.bytes)]
            stream.fill(sock, data, time.monotonic() + transfer_limit_s(len(data)))
            if progress is not None:
                progress()
        wrong = mismatch(header, memory.data) if progress is None else None
        if wrong is not None:
            raise MessageError(f"{header.key.label} came damaged: {wrong}")
    except BaseException:
        memory.close()
        raise
    return memory
