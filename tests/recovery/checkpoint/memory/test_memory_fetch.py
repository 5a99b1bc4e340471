"""A part that another node hands over: waited for as long as it comes, and no longer than anybody
wants it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.recovery.checkpoint.memory.test_memory import (
    Start,
    client_of,
    fetched,
    introduce,
    key,
    offer,
    part,
    start,
)
from tests.support.running import LIMIT_S
from trainchaos.recovery.checkpoint.memory import peers, protocol
from trainchaos.recovery.checkpoint.memory.client import KeeperClient, KeeperError

__all__ = ["start"]
PIECE = 1024
PIECES = 12  # of what ``part`` makes


class Away:
    """A keeper that has nothing itself, and one whose data come as a test has them come."""

    def __init__(self, start: Start, patch: pytest.MonkeyPatch) -> None:
        one, two = start(0, nodes=2, replicate=False), start(1, nodes=2, replicate=False)
        introduce(one, two)
        offer(client_of(two), 7)
        self.keeper = one
        self.before: Callable[[int], None] = lambda piece: None
        patch.setattr(peers, "RECEIVE_BYTES", PIECE)
        patch.setattr(protocol, "send_file", self._send)

    def _send(self, sock: socket.socket, fd: int, size: int, *, limit_s: float) -> None:
        sock.settimeout(limit_s)
        for number, start_at in enumerate(range(0, size, PIECE)):
            self.before(number)
            sock.sendall(os.pread(fd, min(PIECE, size - start_at), start_at))

    def client(self, check: Callable[[], None] = lambda: None) -> KeeperClient:
        return KeeperClient(self.keeper.socket, check=check)  # type: ignore[attr-defined]


@pytest.fixture
def away(start: Start, monkeypatch: pytest.MonkeyPatch) -> Away:
    return Away(start, monkeypatch)


def test_each_piece_that_comes_is_a_sign_of_life(away: Away) -> None:
    signs = threading.Semaphore(0)
    seen: list[int] = []

    def before(piece: int) -> None:
        # Nothing goes on before whoever waits has heard of the piece before.
        for _ in range(piece > 0):
            assert signs.acquire(timeout=LIMIT_S), f"no sign of piece {piece - 1}"
            seen.append(piece)

    away.before = before
    fetched(away.client(), key(7), progress=signs.release)
    assert seen == list(range(1, PIECES))


def test_what_comes_slowly_is_waited_for_however_long(away: Away) -> None:
    """All of it takes twice as long as nothing may come."""
    away.before = lambda piece: threading.Event().wait(0.2) and None
    fetched(away.client(), key(7), limit_s=PIECES * 0.1)


def test_what_does_not_come_is_given_up(away: Away) -> None:
    go = threading.Event()
    away.before = lambda piece: None if piece < 3 else go.wait(LIMIT_S) and None
    with pytest.raises(KeeperError, match=r"nothing came within 0\.3 s"):
        away.client().fetch(key(7), connect_s=0, limit_s=0.3)
    go.set()


def test_whoever_is_to_leave_does_not_wait_and_takes_no_answer_for_another(away: Away) -> None:
    class Lost(Exception):
        """The generation is over."""

    go, waits = threading.Event(), threading.Event()
    wanted = True

    def before(piece: int) -> None:
        if piece == 3:
            waits.set()
            assert go.wait(LIMIT_S)

    def check() -> None:
        if not wanted and waits.is_set():
            raise Lost

    away.before = before
    client = away.client(check)
    wanted = False
    with pytest.raises(Lost):
        client.fetch(key(7), connect_s=0)
    go.set()
    wanted = True
    offer(client, 8)
    assert client.listing(connect_s=0).nodes[0] == (key(8),)
    assert fetched(client, key(8)).key == key(8)


def test_a_copy_is_still_given_up_when_it_is_not_worth_the_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits for the save that it belongs to."""
    monkeypatch.setattr(peers, "transfer_limit_s", lambda size: 0.3)
    header, memory = part(7)
    ours, theirs = socket.socketpair()

    def trickle() -> None:
        for start_at in range(0, header.bytes, PIECE):
            threading.Event().wait(0.1)
            with suppress(BrokenPipeError):  # nobody waits for it any more
                theirs.send(memory.data[start_at : start_at + PIECE])

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    with ours, pytest.raises(TimeoutError):
        peers.receive_part(ours, header)
    thread.join(LIMIT_S)
    theirs.close()
    memory.close()
