"""How keepers announce what they hold to all others: along a tree, over few connections that stay
open for a while.

The others form a ring after the sender. It sends to those 1, 2, 4, 8 ... places on, each of which
passes the note on, in the same way, to all before the next of these: of n keepers each receives it
once, after log2(n) hops at the most, and each only ever sends to log2(n) others. Notes that wait
for the same keeper travel together, and only the newest from each.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from socket import socket

from msgspec import structs

from trainchaos.recovery.checkpoint.memory import protocol
from trainchaos.recovery.checkpoint.memory.peers import ASK_LIMIT_S, Address, Peers
from trainchaos.recovery.checkpoint.memory.protocol import Kept, Note, Notes
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.stream import MessageError

IDLE_S = 5.0  # after this a connection is closed: the next note may be long in coming
CLOSE_LIMIT_S = 5.0

AnswerHandler = Callable[[int, Kept], None]
Failed = Callable[[int, Exception], None]


def branches(nodes: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Direct receivers, each with the nodes that it passes the note on to; ``nodes``: in the order
    of the ring.
    """
    start, size = 0, 1
    while start < len(nodes):
        yield nodes[start], tuple(nodes[start + 1 : start + size])
        start, size = start + size, size * 2


class NoteSender:
    """Sends notes to one keeper, on a thread of its own, in order. ``told``: called with its
    answer, or with the error and the undelivered notes.
    """

    def __init__(
        self, node: int, peers: Peers, told: Callable[[int, list[Note], Kept | Exception], None]
    ) -> None:
        self._node = node
        self._peers = peers
        self._told = told
        self._sock: socket | None = None
        self._at: Address | None = None
        self._waiting: queue.SimpleQueue[tuple[Note, Future[None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"line-{node}", daemon=True)
        self._thread.start()

    def say(self, note: Note) -> Future[None]:
        """Queue a note; done when the other side has it, or cannot get it."""
        future: Future[None] = Future()
        self._waiting.put((note, future))
        return future

    def close(self) -> None:
        """Close after sending what waits."""
        self._waiting.put(None)

    def await_end(self, limit_s: float) -> None:
        """After ``close``, wait until nothing is sent any more."""
        self._thread.join(limit_s)

    def _run(self) -> None:
        ends = False
        while not ends:
            letters = self._take()
            ends = None in letters
            said = [letter for letter in letters if letter is not None]
            if said:
                newest = {
                    note.node: note
                    for note, _ in sorted(said, key=lambda letter: letter[0].version)
                }
                self._tell(list(newest.values()))
            for _, future in said:
                future.set_result(None)
        self._hang_up()

    def _take(self) -> list[tuple[Note, Future[None]] | None]:
        """All waiting notes; blocks until there is one."""
        letters: list[tuple[Note, Future[None]] | None] = []
        while not letters:
            try:
                letters.append(self._waiting.get(timeout=IDLE_S))
            except queue.Empty:
                self._hang_up()
        while letters[-1] is not None and not self._waiting.empty():
            letters.append(self._waiting.get_nowait())
        return letters

    def _tell(self, notes: list[Note]) -> None:
        outcome: Kept | Exception
        try:
            outcome = self._ask(Notes(notes=tuple(notes)))
        except (OSError, MessageError) as error:
            self._hang_up()
            outcome = error
        self._told(self._node, notes, outcome)

    def _ask(self, notes: Notes) -> Kept:
        """Use the existing connection, or one new one: the keeper may have closed it since, or been
        replaced.
        """
        at = self._peers.addresses.get(self._node)
        if at != self._at:
            self._hang_up()
        self._at = at
        for fresh in [True] if self._sock is None else [False, True]:
            try:
                self._sock = self._sock or self._peers.open(self._node)
                stream.send(self._sock, notes)
                answer, _ = protocol.receive_answer(self._sock, limit_s=ASK_LIMIT_S)
                break
            except (BrokenPipeError, ConnectionResetError):
                self._hang_up()
                if fresh:
                    raise
        if isinstance(answer, Kept):
            return answer
        raise MessageError("not an answer to notes")

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class Announcer:
    """Thread-safe. ``heard``: called with a keeper's answer; ``failed``: called with a keeper that
    does not answer, and the reason.
    """

    def __init__(self, peers: Peers, *, heard: AnswerHandler, failed: Failed) -> None:
        self._peers = peers
        self._heard = heard
        self._failed = failed
        self._lines: dict[int, NoteSender] = {}
        self._closed = False
        self._lock = threading.Lock()

    def announce(self, note: Note, nodes: Sequence[int]) -> list[Future[None]]:
        """Announce to all of these; done when the direct receivers have it. ``nodes``: by the
        ring.
        """
        return [self._say(head, structs.replace(note, on=rest)) for head, rest in branches(nodes)]

    def tell(self, note: Note, node: int) -> Future[None]:
        """Send to one keeper."""
        return self._say(node, note)

    def close(self) -> None:
        """Stop announcing."""
        with self._lock:
            self._closed = True
            lines = list(self._lines.values())
        for line in lines:
            line.close()
        for line in lines:
            line.await_end(CLOSE_LIMIT_S)

    def _say(self, node: int, note: Note) -> Future[None]:
        with self._lock:
            if self._closed:
                done: Future[None] = Future()
                done.set_result(None)
                return done
            if node not in self._lines:
                self._lines[node] = NoteSender(node, self._peers, self._told)
            return self._lines[node].say(note)

    def _told(self, node: int, notes: list[Note], outcome: Kept | Exception) -> None:
        if isinstance(outcome, Kept):
            self._heard(node, outcome)
            return
        self._failed(node, outcome)
        for note in notes:  # the nodes it would have passed them on to
            self.announce(note, note.on)
