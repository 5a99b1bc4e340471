"""Keepers of checkpoints in memory, without training: what they take, refuse, copy, hand over and
let go.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import ValidationError, convert, to_builtins

from tests.support.running import LIMIT_S, until
from trainchaos.recovery.checkpoint.files import pieces
from trainchaos.recovery.checkpoint.memory import protocol
from trainchaos.recovery.checkpoint.memory.client import KeeperClient, KeeperError
from trainchaos.recovery.checkpoint.memory.header import (
    VERSION,
    Header,
    Key,
    MemoryFile,
    complete,
    create,
    is_memory,
    name_of,
)
from trainchaos.recovery.checkpoint.memory.keeper import Keeper, KeeperConfig
from trainchaos.recovery.checkpoint.memory.keeper_store import KeeperStore
from trainchaos.recovery.checkpoint.memory.peers import Peers
from trainchaos.recovery.checkpoint.memory.protocol import Ask, Kept, Refusal
from trainchaos.recovery.transport import auth, stream
from trainchaos.recovery.transport.stream import MessageError, packed

JOB = "job"
TOKEN = "ab" * 32
SIZE = 3 * 4096


def key(step: int, *, shard: int = 0, shards: int = 1, generation: int = 1) -> Key:
    return Key(generation=generation, step=step, shard=shard, shards=shards)


def part(
    step: int,
    *,
    size: int = SIZE,
    seat: str = "",
    buffer: int = 0,
    job: str = JOB,
    **which: int,
) -> tuple[Header, MemoryFile]:
    """Something to keep: bytes that follow from step and shard."""
    memory, about = create(size, name="test"), key(step, **which)
    memory.data[:] = bytes((step * 7 + about.shard * 13 + n // 4096) % 256 for n in range(size))
    header = Header(
        job=job,
        key=about,
        bytes=size,
        pieces=tuple(pieces.of_memory(memory.data)),
        tensors={},
        scalars={"step": step},
        seat=seat or f"w{about.shard}",
        buffer=buffer,
    )
    return header, memory


Start = Callable[..., Keeper]


@pytest.fixture
def start(capfd: pytest.CaptureFixture[str]) -> Iterator[Start]:
    """Starts keepers on threads of this process, each with a socket named ``<place>-<node>``."""
    running: list[Keeper] = []

    def begin(node: int = 0, **more: Any) -> Keeper:
        given: dict[str, Any] = {
            "limit_bytes": 1 << 20,
            "token": TOKEN,
            "name": secrets.token_hex(8),
            **more,
        }
        config = KeeperConfig(parent=os.getpid(), node=node, job=JOB, **given)
        running.append(Keeper(config))
        running[-1].socket = config.name  # type: ignore[attr-defined]
        return running[-1]

    yield begin
    for keeper in running:
        keeper.close()


def introduce(*keepers: Keeper) -> None:
    """Tell keepers, in the order of their nodes, where they are, and wait until they have
    spoken.
    """
    addresses = {node: ("127.0.0.1", keeper.port) for node, keeper in enumerate(keepers)}
    for node, keeper in enumerate(keepers):
        speaking = keeper.know({n: address for n, address in addresses.items() if n != node})
        speaking.join(LIMIT_S)
        assert not speaking.is_alive()


@pytest.fixture
def pair(start: Start) -> tuple[Keeper, Keeper]:
    """Two that know each other."""
    one, two = start(0, nodes=2), start(1, nodes=2)
    introduce(one, two)
    return one, two


def client_of(keeper: Keeper) -> KeeperClient:
    return KeeperClient(keeper.socket)  # type: ignore[attr-defined]


def offer(client: KeeperClient, step: int, **more: Any) -> Kept:
    header, memory = part(step, **more)
    with closing(memory):
        return client.offer(header, memory.fd)


def fetched(client: KeeperClient, which: Key, **more: Any) -> Header:
    """A part that was handed over whole."""
    header, fd = client.fetch(which, connect_s=0, **more)
    data = os.pread(fd, header.bytes, 0)
    os.close(fd)
    assert header.mismatch(memoryview(data)) is None
    _, expected = part(which.step, shard=which.shard, shards=which.shards)
    assert data == bytes(expected.data)
    return header


def steps_of(keys: Sequence[Key]) -> list[int]:
    return [k.step for k in keys]


def held_at(client: KeeperClient, node: int = 0) -> list[int]:
    return steps_of(client.listing(connect_s=0).nodes[node])


def eventually(seen: Callable[[], bool]) -> bool:
    """It comes true; each look takes a request or more."""
    until(seen)
    return True


# ---- what stays


def test_what_is_offered_is_handed_back_and_outlives_whoever_offered_it(start: Start) -> None:
    keeper = start()
    offer(client_of(keeper), 5)
    assert fetched(client_of(keeper), key(5)).scalars == {"step": 5}


def test_the_newest_two_complete_ones_stay_and_buffers_come_back(start: Start) -> None:
    client = client_of(start())
    told = [offer(client, step, buffer=step % 3) for step in (1, 2, 3, 4)]
    assert steps_of(told[-1].held) == [3, 4]
    assert [kept.released for kept in told] == [(), (), (1,), (2,)]


def test_a_checkpoint_counts_only_when_all_its_shards_are_there(start: Start) -> None:
    client = client_of(start())
    for step in (1, 2):
        for shard in (0, 1):
            offer(client, step, shard=shard, shards=2)
    for step in (3, 4, 5):  # shard 1 fails to save from now on
        held = offer(client, step, shard=0, shards=2).held
    assert complete(held) == [(1, 1), (1, 2)], "nothing complete was given up for what is torn"
    assert steps_of(held) == [1, 1, 2, 2, 3, 4, 5]
    held = offer(client, 4, shard=1, shards=2).held
    assert complete(held) == [(1, 2), (1, 4)]


def test_what_a_later_generation_saved_is_newer_whatever_its_step(start: Start) -> None:
    client = client_of(start())
    for step in (40, 50):
        offer(client, step)
    offer(client, 41, generation=2)  # the job went back to 40 on purpose
    assert complete([key(50), key(41, generation=2), key(40)]) == [(1, 40), (1, 50), (2, 41)]
    assert complete(client.listing(connect_s=0).nodes[0])[-1] == (2, 41)
    assert steps_of(offer(client, 42, generation=2).held) == [41, 42]


def test_a_full_store_says_what_would_work_and_overwrites_nothing(start: Start) -> None:
    client = client_of(start(limit_bytes=2 * SIZE + 100))
    for step in (1, 2):
        offer(client, step)
    assert steps_of(offer(client, 3).held) == [2, 3], "one older than the newest complete one goes"
    with pytest.raises(
        KeeperError,
        match=r"is full: 0\.0\d MB of 0\.0\d MB .* step 4 of generation 1 needs .*raise the limit"
        r" to 0\.0\d MB or more",
    ):
        offer(client, 4, size=2 * SIZE)
    with pytest.raises(KeeperError, match="full"):
        offer(client, 4, shard=1, shards=2, size=2 * SIZE)
    assert held_at(client) == [2, 3]
    fetched(client, key(3))


def store_of(limit: int = 1 << 20, *, keep: int = 2, doubles: bool = False) -> KeeperStore:
    return KeeperStore(job=JOB, limit_bytes=limit, keep=keep, doubles=doubles)


def put(store: KeeperStore, step: int, **more: Any) -> None:
    header, memory = part(step, **more)
    store.add(header, memory.detach(), copy=False)


def test_following_the_advice_of_a_full_store_is_enough() -> None:
    store = store_of(2 * SIZE)
    for shard in (0, 1):
        put(store, 1, shard=shard, shards=4)
    with pytest.raises(Refusal) as said:
        put(store, 1, shard=2, shards=4)
    advised = float(str(said.value).split("raise the limit to ")[1].split(" MB")[0])
    assert advised * 1e6 >= 3 * SIZE


def test_with_peers_room_is_made_only_at_the_cost_of_what_is_held_twice(start: Start) -> None:
    one, two = start(0, limit_bytes=2 * SIZE, nodes=2), start(1, limit_bytes=2 * SIZE, nodes=2)
    introduce(one, two)
    client = client_of(one)
    for step in (1, 2):
        assert offer(client, step).copies == (1,)
    two.close()
    kept = offer(client, 3)
    assert steps_of(kept.held) == [2, 3] and kept.copies == () and kept.alone, (
        "2 was held twice, so 1 could go"
    )
    with pytest.raises(KeeperError, match="full"):
        offer(client, 4)  # nothing is known to be held twice any more
    assert held_at(client) == [2, 3]


def test_a_buffer_that_is_being_sent_is_not_given_back() -> None:
    store = store_of(keep=1)
    put(store, 1, buffer=1)
    with store.lent(key(1)) as entry:
        put(store, 2, buffer=2)
        assert entry is not None and store.held() == (key(2),)
        assert store.take_released("w0") == ()
        os.fstat(entry.fd)  # still open
    assert store.take_released("w0") == (1,)


# ---- what is refused


def test_a_file_that_is_torn_or_could_shrink_is_refused(start: Start, tmp_path: Path) -> None:
    client = client_of(start())
    header, memory = part(1)
    short = create(SIZE - 1, name="short")
    with pytest.raises(KeeperError, match=f"{SIZE - 1} bytes, and its header says {SIZE}"):
        client.offer(header, short.fd)
    short.close()
    path = tmp_path / "data"
    path.write_bytes(memory.data)
    with open(path, "rb") as plain, pytest.raises(KeeperError, match="no memory file"):
        client.offer(header, plain.fileno())
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, SIZE)
    with pytest.raises(KeeperError, match="not sealed"):
        client.offer(header, loose)
    os.close(loose)
    assert held_at(client) == []


def test_an_old_generation_and_another_job_are_refused(start: Start) -> None:
    client = client_of(start())
    offer(client, 8, generation=3)
    with pytest.raises(KeeperError, match="generation 2 is over: 3 has saved"):
        offer(client, 9, generation=2)
    with pytest.raises(KeeperError, match="of job 'other'"):
        offer(client, 9, generation=3, job="other")
    assert held_at(client) == [8]


def test_what_is_not_trusted_is_let_go_of_everywhere_and_not_taken_any_more(
    pair: tuple[Keeper, Keeper],
) -> None:
    client = client_of(pair[0])
    for step in (7, 8):
        offer(client, step)
    assert set(steps_of(client.forget(7, 2, connect_s=0))) == {8}
    assert [held_at(client, node) for node in (0, 1)] == [[7], [7]]
    with pytest.raises(KeeperError, match="step 9 of generation 1 may hold a corrupted state"):
        offer(client, 9)
    assert steps_of(offer(client, 8, generation=2).held) == [7, 8], (
        "done again by a later generation, it is good"
    )


def test_an_answer_from_before_the_doubt_counts_for_nothing() -> None:
    store = store_of(doubles=True)
    for step in (7, 8):
        put(store, step)
    store.forget(7, 2)
    store.heard(1, (key(7), key(8)))  # under way when the doubt came up
    assert store.known_at(1) == (key(7),)
    put(store, 8, generation=2)
    assert store.held() == (key(7), key(8, generation=2))


def test_a_header_that_contradicts_itself_is_no_header() -> None:
    good = to_builtins(part(1)[0])
    for wrong, words in (
        ({"bytes": SIZE + 1}, "pieces of 12288 bytes for 12289"),
        ({"pieces": good["pieces"][1:]}, "do not meet at byte 0"),
        ({"version": 1}, "version"),
        ({"surprise": 1}, "surprise"),
        ({"key": {"generation": 1, "step": 1, "shard": 2, "shards": 2}}, "shard 2 of 2"),
    ):
        with pytest.raises(ValidationError, match=words):
            convert({**good, **wrong}, Header)


def test_names_say_where_a_checkpoint_is() -> None:
    assert is_memory(name_of(50)) and name_of(50) == "memory-step-00000050"
    assert not is_memory("step-00000050")


# ---- copies


def test_a_peer_has_a_copy_and_a_new_keeper_hands_it_over(
    start: Start, pair: tuple[Keeper, Keeper]
) -> None:
    one, two = pair
    assert offer(client_of(one), 7).copies == (1,)
    one.close()
    again = start(0, nodes=2, peers={1: ("127.0.0.1", two.port)})
    client = client_of(again)
    listing = client.listing(connect_s=0)
    assert listing.nodes == {0: (), 1: (key(7),)} and not listing.lost
    fetched(client, key(7))


def test_a_lost_peer_costs_the_copy_which_the_one_that_follows_gets(
    start: Start, pair: tuple[Keeper, Keeper]
) -> None:
    one, two = pair
    two.close()
    kept = offer(client_of(one), 7)
    assert kept.copies == () and "node 1" in kept.alone
    listing = client_of(one).listing(connect_s=0)
    assert listing.nodes[0] == (key(7),) and set(listing.lost) == {1}
    again = start(1, nodes=2)
    introduce(one, again)
    assert eventually(lambda: held_at(client_of(again), 1) == [7])


def test_a_peer_that_does_not_answer_holds_up_one_save_and_not_each(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(protocol.HELLO, "limit_s", 0.5)
    # takes connections and says nothing, as a stopped process
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        keeper = start(0, nodes=2, peers={1: deaf.getsockname()})
        client = client_of(keeper)
        assert auth.LATE in offer(client, 1).alone
        assert "did not answer in time a moment ago" in offer(client, 2).alone
        monkeypatch.undo()
        again = start(1, nodes=2)
        introduce(keeper, again)
        assert eventually(lambda: 2 in held_at(client_of(again), 1))


def test_a_full_peer_refuses_the_copy_before_the_data_are_sent(start: Start) -> None:
    one, two = start(0, nodes=2), start(1, nodes=2, limit_bytes=SIZE - 1)
    introduce(one, two)
    kept = offer(client_of(one), 7)
    assert kept.copies == () and "is full" in kept.alone
    assert kept.held == (key(7),)


def test_damage_on_the_way_is_found_by_whoever_receives(pair: tuple[Keeper, Keeper]) -> None:
    header, memory = part(7)
    memory.data[-1] ^= 1  # after the checksums were made
    kept = client_of(pair[0]).offer(header, memory.fd)
    assert kept.copies == () and "to 12288 do not match their checksum" in kept.alone
    memory.close()


def test_a_peer_lost_in_the_middle_of_a_copy_leaves_nothing_behind(start: Start) -> None:
    keeper = start()
    header, memory = part(7)
    peers = peer_of(keeper)
    with peers._connect(0) as sock:
        note = protocol.Note(node=9, version=1, held=())
        stream.send(sock, protocol.Put(note=note, header=header))
        protocol.receive_answer(sock, Kept, limit_s=LIMIT_S)
        sock.sendall(memory.data[:4096])
    assert peers.ask_all(Ask()) == ({0: ()}, {})
    memory.close()


# ---- connections


def peer_of(keeper: Keeper, *, token: str = TOKEN) -> Peers:
    return Peers(9, bytes.fromhex(token), {0: ("127.0.0.1", keeper.port)})


def test_who_does_not_know_the_token_is_turned_away(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    keeper = start()
    with pytest.raises((OSError, MessageError)):
        peer_of(keeper, token="cd" * 32).open(0)
    assert eventually(lambda: "does not know the run's token" in capfd.readouterr().err)
    assert peer_of(keeper).ask_all(Ask()) == ({0: ()}, {}), "and the keeper goes on"


def test_a_keeper_that_does_not_know_the_token_is_not_believed() -> None:
    """Somebody listens in the keeper's place and answers the challenge with a guess."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lie() -> None:
            sock, _ = listener.accept()
            with sock:
                until_s = time.monotonic() + LIMIT_S
                auth._send(sock, packed(auth._Challenge(version=VERSION, nonce="0" * 64)), until_s)
                auth._receive(sock, auth._Response, until_s)
                auth._send(sock, packed(auth._Answer(mac="0" * 64)), until_s)

        thread = threading.Thread(target=lie, daemon=True)
        thread.start()
        peers = Peers(9, bytes.fromhex(TOKEN), {0: listener.getsockname()})
        assert peers.ask_all(Ask())[1] == {0: "the other side does not know the run's token"}
        thread.join(timeout=LIMIT_S)


@pytest.mark.parametrize(
    "words",
    [
        b"\xff" * 4,
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x02{}",
        b"\x00",
    ],
    ids=["huge", "http", "no-json", "empty", "half"],
)
def test_garbage_ends_its_connection_only(start: Start, words: bytes) -> None:
    keeper = start()
    client = client_of(keeper)
    offer(client, 1)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.settimeout(LIMIT_S)
    unix.connect("\0" + keeper.socket)  # type: ignore[attr-defined]
    for sock in unix, socket.create_connection(("127.0.0.1", keeper.port), timeout=LIMIT_S):
        with sock:
            sock.sendall(words)
            with suppress(OSError):  # it hangs up with our words unread
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    assert held_at(client) == [1]


@pytest.mark.slow
def test_more_ranks_than_sixty_four_of_a_node_reach_their_keeper(start: Start) -> None:
    keeper = start()
    clients = [client_of(keeper) for _ in range(100)]
    assert all(client.listing(connect_s=0).nodes == {0: ()} for client in clients)
    for client in clients:
        client.close()


def test_nobody_to_ask_is_said_and_a_keeper_that_is_starting_is_waited_for(start: Start) -> None:
    name = secrets.token_hex(8)
    client = KeeperClient(name)
    with pytest.raises(KeeperError, match=r"the keeper of this node: .*refused"):
        client.listing(connect_s=0)
    threading.Timer(0.05, lambda: start(name=name)).start()
    assert client.listing(connect_s=5).nodes == {0: ()}


def test_a_client_goes_on_with_the_keeper_that_follows(start: Start) -> None:
    first = start()
    client = client_of(first)
    offer(client, 1)
    first.close()
    sock = client._line._sock
    assert sock is not None
    sock.shutdown(socket.SHUT_RDWR)  # as the kernel does for a keeper that is killed
    second = start(name=first.socket)  # type: ignore[attr-defined]
    assert steps_of(offer(client, 2).held) == [2]
    assert second is not first
