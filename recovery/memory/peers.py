"""The keepers of the other nodes, as one keeper sees them: one short connection for each request."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from recovery.memory import talk
from recovery.memory.files import MemoryFile, create, populate
from recovery.memory.header import Header, Key, mismatch
from recovery.memory.holdings import Entry
from recovery.memory.talk import Ask, Fetch, Forget, Found, Held, Kept, Note, Put, TalkError

CONNECT_LIMIT_S = 2.0
ASK_LIMIT_S = 2.0
SEND_LIMIT_S = 10.0  # for the other side to take or give some bytes more, not for all of them
SHUN_S = (
    10.0  # a node that did not answer in time is not asked again for so long: each save would wait for it
)
MIN_RATE = 10e6  # bytes/s; a transfer slower than this is given up

Address = tuple[str, int]


def transfer_limit_s(size: int) -> float:
    """Within which so many bytes have to come."""
    return SEND_LIMIT_S + size / MIN_RATE


class Peers:
    """Thread-safe. ``node``: whose view this is; ``token``: of the run."""

    def __init__(self, node: int, token: bytes, addresses: Mapping[int, Address]) -> None:
        self._node = node
        self._token = token
        self._addresses = dict(addresses)
        self._shunned: dict[int, float] = {}  # node -> until when
        self._lock = threading.Lock()

    def know(self, addresses: Mapping[int, Address]) -> None:
        """Where they are from now on."""
        with self._lock:
            self._addresses = dict(addresses)
            self._shunned = {}

    def nodes(self) -> list[int]:
        """All others."""
        with self._lock:
            return sorted(set(self._addresses) - {self._node})

    def successor(self) -> int | None:
        """The node that holds copies of this one's: the next one in a ring of all; None: there is no other."""
        nodes = self.nodes()
        return next((node for node in nodes if node > self._node), nodes[0]) if nodes else None

    def held(self) -> tuple[dict[int, tuple[Key, ...]], dict[int, str]]:
        """What they hold, and who does not answer and why; all are asked at once."""
        held: dict[int, tuple[Key, ...]] = {}
        lost: dict[int, str] = {}
        nodes = self.nodes()
        if not nodes:
            return held, lost
        with ThreadPoolExecutor(max_workers=min(16, len(nodes))) as pool:
            for node, answer in zip(nodes, pool.map(self._ask_held, nodes), strict=True):
                if isinstance(answer, str):
                    lost[node] = answer
                else:
                    held[node] = answer
        return held, lost

    def put(self, node: int, entry: Entry, held: tuple[Key, ...]) -> Kept:
        """Send a copy. Raises TalkError when it is refused, OSError."""
        header = entry.header
        with self._connect(node) as sock:
            talk.send(sock, Put(node=self._node, held=held, header=header))
            ready, _ = talk.receive_answer(sock, limit_s=ASK_LIMIT_S)  # a full keeper says so before the data
            if isinstance(ready, talk.Refused):
                raise TalkError(ready.reason)
            talk.send_file(sock, entry.fd, header.bytes, limit_s=SEND_LIMIT_S)
            answer, _ = talk.receive_answer(sock, limit_s=transfer_limit_s(header.bytes))
        if isinstance(answer, Kept):
            return answer
        raise TalkError(answer.reason if isinstance(answer, talk.Refused) else "not an answer to a copy")

    def note(self, node: int, held: tuple[Key, ...]) -> tuple[Key, ...]:
        """Say what is held here; returns what is held there. Raises TalkError, OSError."""
        with self._connect(node) as sock:
            talk.send(sock, Note(node=self._node, held=held))
            answer, _ = talk.receive_answer(sock, limit_s=ASK_LIMIT_S)
        if isinstance(answer, Kept):
            return answer.held
        raise TalkError("not an answer to a note")

    def forget(self, node: int, step: int, before: int) -> tuple[Key, ...]:
        """Have it let go of what is doubtful; what is gone there. Raises TalkError, OSError."""
        with self._connect(node) as sock:
            talk.send(sock, Forget(step=step, before=before))
            answer, _ = talk.receive_answer(sock, limit_s=ASK_LIMIT_S)
        if isinstance(answer, Kept):
            return answer.held
        raise TalkError("not an answer")

    def fetch(self, node: int, key: Key) -> tuple[Header, MemoryFile]:
        """Get a part into a memory file of our own; whoever restores it checks it. Raises TalkError, OSError."""
        with self._connect(node, restoring=True) as sock:
            talk.send(sock, Fetch(key=key))
            answer, _ = talk.receive_answer(sock, limit_s=ASK_LIMIT_S)
            if not isinstance(answer, Found):
                raise TalkError(
                    answer.reason if isinstance(answer, talk.Refused) else "not an answer to a fetch"
                )
            return answer.header, receive_part(sock, answer.header, check=False)

    def _ask_held(self, node: int) -> tuple[Key, ...] | str:
        try:
            with self._connect(node, restoring=True) as sock:
                talk.send(sock, Ask())
                answer, _ = talk.receive_answer(sock, limit_s=ASK_LIMIT_S)
        except (OSError, TalkError) as error:
            return str(error) or type(error).__name__
        return answer.nodes.get(node, ()) if isinstance(answer, Held) else "not an answer to a list"

    @contextmanager
    def _connect(self, node: int, *, restoring: bool = False) -> Iterator[socket.socket]:
        """``restoring``: it is worth the wait, whatever happened a moment ago."""
        with self._lock:
            address = self._addresses.get(node)
            shunned = time.monotonic() < self._shunned.get(node, 0.0)
        if address is None:
            raise ConnectionRefusedError(f"node {node} has no keeper")
        if shunned and not restoring:
            raise ConnectionRefusedError(f"node {node} did not answer in time a moment ago")
        try:
            with socket.create_connection(address, timeout=CONNECT_LIMIT_S) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                talk.enter(sock, self._token)
                yield sock
        except TimeoutError:
            with self._lock:
                self._shunned[node] = time.monotonic() + SHUN_S
            raise


def receive_part(sock: socket.socket, header: Header, *, check: bool = True) -> MemoryFile:
    """Read a part's data into a memory file and check them. Raises TalkError, OSError."""
    memory = create(header.bytes, name="copy")
    try:
        populate(memory)
        talk.receive_into(sock, memory.data[: header.bytes], limit_s=transfer_limit_s(header.bytes))
        wrong = mismatch(header, memory.data) if check else None
        if wrong is not None:
            raise TalkError(f"{header.key.label} came damaged: {wrong}")
    except BaseException:
        memory.close()
        raise
    return memory
