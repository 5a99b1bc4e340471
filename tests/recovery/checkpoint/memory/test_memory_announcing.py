"""What one keeper holds all others hear of, once, over few connections; keepers on threads of this
process.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.recovery.checkpoint.memory.test_memory import (
    JOB,
    TOKEN,
    client_of,
    eventually,
    introduce,
    key,
    offer,
)
from tests.support.running import LIMIT_S
from trainchaos.recovery.checkpoint.memory import protocol
from trainchaos.recovery.checkpoint.memory.announcing import branches
from trainchaos.recovery.checkpoint.memory.keeper import PEERS_TOPIC, TOPIC, Keeper, KeeperConfig
from trainchaos.recovery.checkpoint.memory.keepers import Keepers
from trainchaos.recovery.checkpoint.memory.peers import Peers
from trainchaos.recovery.checkpoint.memory.protocol import Note, Notes
from trainchaos.recovery.process.host import Exited, MessageReceived, Report
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.wire import Extra, Message

MANY = 20


class Traffic:
    """Connections that keepers open, as (from, to), and the lines of notes that they send."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: Counter[tuple[int, int]] = Counter()
        self.lines = 0
        self._lock = threading.Lock()
        opening, sending = Peers.open, stream.send

        def counted(peers: Peers, node: int, *, restoring: bool = False) -> socket.socket:
            with self._lock:
                self.opened[peers._node, node] += 1
            return opening(peers, node, restoring=restoring)

        def send(sock: socket.socket, message: Any, *more: Any) -> None:
            with self._lock:
                self.lines += isinstance(message, Notes)
            sending(sock, message, *more)

        patch.setattr(Peers, "open", counted)
        patch.setattr(stream, "send", send)


@pytest.fixture
def ring() -> Iterator[Callable[..., list[Keeper]]]:
    """So many keepers that know each other and keep no copies."""
    running: list[Keeper] = []

    def begin(count: int, **more: Any) -> list[Keeper]:
        for node in range(count):
            config = KeeperConfig(
                parent=os.getpid(),
                node=node,
                nodes=count,
                job=JOB,
                token=TOKEN,
                name=secrets.token_hex(8),
                limit_bytes=1 << 20,
                **{"replicate": False, **more},
            )
            running.append(Keeper(config))
            running[-1].socket = config.name  # type: ignore[attr-defined]
        introduce(*running)
        return running

    yield begin
    with ThreadPoolExecutor(max_workers=len(running) or 1) as pool:
        list(pool.map(Keeper.close, running))


def knows(keeper: Keeper, node: int, step: int) -> bool:
    return key(step, shard=0) in keeper._store.known_at(node)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 20, 64, 65, 1000])
def test_all_are_told_once_in_few_hops_by_few_connections(count: int) -> None:
    hops: dict[int, int] = {}

    def tell(nodes: tuple[int, ...], hop: int) -> None:
        heads = list(branches(nodes))
        assert len(heads) <= math.log2(count or 1) + 1
        for head, rest in heads:
            assert head not in hops
            hops[head] = hop
            tell(rest, hop + 1)

    tell(tuple(range(count)), 1)
    assert sorted(hops) == list(range(count))
    assert max(hops.values(), default=0) <= (math.log2(count) + 1 if count else 0)


def test_whom_a_keeper_speaks_to_is_the_same_for_its_own_word_and_for_others() -> None:
    """Else it would need connections to all."""
    count, spoken = 64, set()
    for origin in range(count):
        ring = [(origin + place) % count for place in range(1, count)]
        pending = [(origin, ring)]
        while pending:
            teller, nodes = pending.pop()
            for head, rest in branches(nodes):
                spoken.add((head - teller) % count)
                pending.append((head, list(rest)))
    assert spoken == {1, 2, 4, 8, 16, 32}


def test_all_hear_of_one_save_over_few_connections_that_stay(
    ring: Callable[..., list[Keeper]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers, traffic = ring(MANY), Traffic(monkeypatch)
    client = client_of(keepers[3])
    offer(client, 1)
    assert eventually(lambda: all(knows(k, 3, 1) for k in keepers if k is not keepers[3]))
    assert sum(traffic.opened.values()) == traffic.lines == MANY - 1, "each hears it once"
    by = Counter(one for one, _ in traffic.opened.elements())
    assert max(by.values()) <= math.log2(MANY) + 1
    offer(client, 2)
    assert eventually(lambda: all(knows(k, 3, 2) for k in keepers if k is not keepers[3]))
    assert sum(traffic.opened.values()) == MANY - 1, "and again over the same ones"


@pytest.mark.slow
def test_when_all_save_at_once_words_travel_together(
    ring: Callable[..., list[Keeper]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keepers, traffic = ring(MANY), Traffic(monkeypatch)
    with ThreadPoolExecutor(max_workers=MANY) as pool:
        list(pool.map(lambda keeper: offer(client_of(keeper), 1), keepers))
    assert eventually(
        lambda: all(knows(k, n, 1) for k in keepers for n in range(MANY) if k is not keepers[n])
    )
    assert len(traffic.opened) <= MANY * (math.log2(MANY) + 1)
    assert traffic.lines < MANY * (MANY - 1), "fewer than one for each and each"


def test_whom_a_lost_keeper_would_have_told_hears_it_all_the_same(
    ring: Callable[..., list[Keeper]], capfd: pytest.CaptureFixture[str]
) -> None:
    keepers = ring(MANY)
    keepers[4].close()
    keepers[8].close()
    offer(client_of(keepers[0]), 1)
    there = [k for n, k in enumerate(keepers) if n not in (0, 4, 8)]
    assert eventually(lambda: all(knows(k, 0, 1) for k in there))
    assert "node 4 does not answer" in capfd.readouterr().err


def test_an_older_word_never_takes_the_place_of_a_newer_one(
    ring: Callable[..., list[Keeper]],
) -> None:
    one, two = ring(2)
    with Peers(1, bytes.fromhex(TOKEN), {0: ("127.0.0.1", one.port)}).open(0) as sock:
        for version, step in ((10**19, 5), (10**19 - 1, 4)):
            stream.send(sock, Notes(notes=(Note(node=1, version=version, held=(key(step),)),)))
            protocol.receive_answer(sock, limit_s=LIMIT_S)
    assert one._store.known_at(1) == (key(5),)
    one.know({})
    assert one._store.known_at(1) == (), "one that is gone holds nothing"
    one.know({1: ("127.0.0.1", two.port)})
    offer(client_of(two), 6)
    assert eventually(lambda: one._store.known_at(1) == (key(6),)), "another one there begins anew"


@pytest.mark.slow
def test_more_ranks_than_sixty_four_of_a_node_reach_their_keeper(
    ring: Callable[..., list[Keeper]],
) -> None:
    (keeper,) = ring(1)
    clients = [client_of(keeper) for _ in range(100)]
    assert all(client.listing(connect_s=0).nodes == {0: ()} for client in clients)
    for client in clients:
        client.close()


# ---- introductions


class Yard:
    """Where keepers live, as a test says; implements ``KeeperHost``."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.sent: list[tuple[str, Any]] = []

    def takes(self, node: int) -> bool:
        return False

    def address(self, node: int) -> str:
        return f"10.0.0.{node}"

    def start(self, process: str, config: KeeperConfig) -> int:
        self.ready(process, 7000 + config.node)
        return 1

    def ready(self, process: str, port: int) -> None:
        self.reports.append(
            MessageReceived(process=process, message=Extra(topic=TOPIC, payload={"port": port}))
        )

    def alive(self, process: str) -> bool:
        return True

    def send(self, process: str, message: Message) -> bool:
        assert isinstance(message, Extra) and message.topic == PEERS_TOPIC
        self.sent.append((process, message.payload["peers"]))
        return True

    def signal(self, process: str, signum: int) -> None:
        pass

    def os_state(self, process: str) -> str:
        return "S"

    def wait(self, timeout_s: float) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> dict[int, str]:
        return {}


def test_keepers_are_told_once_who_is_there_and_then_only_what_changes() -> None:
    yard = Yard()
    keepers = Keepers(yard, job=JOB, nodes=4, limit_bytes=1, replicate=True)
    assert [process for process, _ in yard.sent] == ["k0", "k1", "k2", "k3"], "one message each"
    assert all(len(peers) == 3 for _, peers in yard.sent)
    assert dict(yard.sent)["k1"]["3"] == ["10.0.0.3", 7003]
    yard.sent.clear()
    yard.reports += [
        Exited(process=name, exit_code=1, signal=None, time_ns=1) for name in ("k1", "k2")
    ]
    keepers.look()
    assert yard.sent == [(name, {"1": None, "2": None}) for name in ("k0", "k3")]
