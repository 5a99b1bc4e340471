"""Who may talk to a coordinator, and which lines it takes."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.running import LIMIT_S, until
from trainchaos.recovery.nodes.coordinator import listener as listening
from trainchaos.recovery.nodes.coordinator.listener import AgentListener
from trainchaos.recovery.nodes.link import handshake
from trainchaos.recovery.nodes.link.handshake import Seal
from trainchaos.recovery.nodes.link.link import Link
from trainchaos.recovery.nodes.link.protocol import (
    LONGEST,
    VERSION,
    Beat,
    Hello,
    Ping,
)
from trainchaos.recovery.transport import auth
from trainchaos.recovery.transport.auth import AuthenticationFailed, TokenRefused
from trainchaos.recovery.transport.stream import LENGTH, MessageError, framed, packed, receive

TOKEN = b"t" * 32
HELLO = Hello(node=0, incarnation="a", epoch=0, host="h", boot="b", address="127.0.0.1")


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    return one, two


def admit(sock: socket.socket, token: bytes, *, limit_s: float = LIMIT_S) -> bytes:
    """Be a coordinator that somebody has dialled."""
    return auth.admit(sock, token, purpose="agents", version=VERSION, limit_s=limit_s)


def prove(left: bytes, right: bytes, *, limit_s: float = LIMIT_S) -> list[bytes | Exception]:
    """What a coordinator and an agent with these tokens come to."""
    found: list[bytes | Exception] = [ValueError(), ValueError()]
    socks = socket.socketpair()

    def one(at: int, act: Callable[..., bytes], token: bytes) -> None:
        try:
            found[at] = act(socks[at], token, limit_s=limit_s)
        except (AuthenticationFailed, OSError) as error:
            found[at] = error
            socks[at].close()

    threads = [
        threading.Thread(target=one, args=(0, admit, left), daemon=True),
        threading.Thread(target=one, args=(1, handshake.enter, right), daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    for sock in socks:
        sock.close()
    return found


def test_both_ends_have_the_same_keys_and_no_two_connections_have() -> None:
    (one, two), (three, _) = prove(TOKEN, TOKEN), prove(TOKEN, TOKEN)
    assert isinstance(one, bytes) and one == two and isinstance(three, bytes) and one != three
    (sends, receives), (theirs, ours) = (
        handshake.seals(one, agent=False),
        handshake.seals(one, agent=True),
    )
    assert ours.open(sends.seal(b"1")) == receives.open(theirs.seal(b"1")) == b"1"
    with pytest.raises(MessageError):
        receives.open(sends.seal(b"2"))


def test_a_wrong_token_is_found_by_both_ends() -> None:
    coordinator, agent = prove(TOKEN, b"f" * 32)
    assert isinstance(coordinator, AuthenticationFailed) and "token" in str(coordinator)
    assert isinstance(agent, AuthenticationFailed | OSError)


def test_a_coordinator_that_does_not_know_the_token_is_not_obeyed() -> None:
    """It answers the challenge it was not given with a guess."""
    left, right = socket.socketpair()
    with left, right:

        def lie() -> None:
            until_s = time.monotonic() + LIMIT_S
            auth._send(left, packed(auth._Challenge(version=VERSION, nonce="0" * 64)), until_s)
            auth._receive(left, auth._Response, until_s)
            auth._send(left, packed(auth._Answer(mac="0" * 64)), until_s)

        thread = threading.Thread(target=lie, daemon=True)
        thread.start()
        with pytest.raises(AuthenticationFailed, match="does not know the run's token"):
            handshake.enter(right, TOKEN)
        thread.join(LIMIT_S)


def test_the_proof_of_another_purpose_proves_nothing() -> None:
    left, right = socket.socketpair()
    with left, right:
        thread = threading.Thread(
            target=lambda: suppressed(auth.enter, right, TOKEN, purpose="keepers", version=VERSION),
            daemon=True,
        )
        thread.start()
        with pytest.raises(AuthenticationFailed, match="token"):
            admit(left, TOKEN)
        left.close()
        thread.join(LIMIT_S)


def suppressed(act: Callable[..., Any], *args: Any, **options: Any) -> None:
    with suppress(AuthenticationFailed, OSError):
        act(*args, **options)


def test_other_software_is_told_apart_from_a_wrong_token() -> None:
    left, right = socket.socketpair()
    with left, right:
        thread = threading.Thread(
            target=lambda: suppressed(auth.enter, right, TOKEN, purpose="agents", version=99),
            daemon=True,
        )
        thread.start()
        with pytest.raises(
            AuthenticationFailed, match=f"speaks version 99, not {VERSION}: run the same software"
        ):
            admit(left, TOKEN)
        thread.join(LIMIT_S)


def test_a_drip_of_bytes_does_not_stretch_the_limit() -> None:
    left, right = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        with suppress(OSError):
            right.sendall(struct.pack("!I", 100))
            while not stop.wait(0.02):
                right.sendall(b" ")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    with left, right:
        with pytest.raises(TimeoutError):  # and not once all has come, which is no proof
            admit(left, TOKEN, limit_s=0.2)
        stop.set()
        thread.join(LIMIT_S)


def test_a_message_is_taken_once_and_in_its_place() -> None:
    key = secrets.token_bytes(32)
    sender, receiver = Seal(key), Seal(key)
    one, two, three = (sender.seal(b"%d" % n) for n in range(3))
    assert receiver.open(one) == b"0"
    for wrong in (one, three):
        with pytest.raises(MessageError, match="repeated, out of order"):
            receiver.open(wrong)
    assert receiver.open(two) == b"1", "what was refused changed nothing"


@given(line=st.binary(max_size=200))
def test_garbage_is_refused_in_words(line: bytes) -> None:
    with pytest.raises(MessageError):
        Seal(TOKEN).open(line)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_is_seen(at: int, bit: int) -> None:
    line = bytearray(Seal(TOKEN).seal(b'{"type":"Ping","sent_ns":1}'))
    line[at % len(line)] ^= 1 << bit
    with pytest.raises(MessageError):
        Seal(TOKEN).open(bytes(line))


def linked(key: bytes = b"k" * 32) -> tuple[Link, Link, socket.socket]:
    """A coordinator's link, an agent's, and the socket below the agent's."""
    one, two = pair()
    return Link(one, key, agent=False), Link(two, key, agent=True), two


def taken(link: Link) -> list[Any]:
    """Until something came, or it failed."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        if parcels := link.take():
            return parcels
    raise AssertionError("nothing came")


def test_what_was_heard_on_one_connection_is_refused_on_another() -> None:
    coordinator, agent, below = linked()
    agent.put(HELLO)
    said = bytes(agent._out)
    agent.flush()
    assert taken(coordinator)[0].frame == HELLO
    below.sendall(said)  # a replay on the same connection
    with pytest.raises(MessageError, match="out of order"):
        taken(coordinator)
    other, _, below = linked(b"1" * 32)
    below.sendall(said)
    with pytest.raises(MessageError, match="of another connection"):
        taken(other)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[0,0,{}]", "not a message"),
        (b'[0,0,{"type":"Welcome","epoch":1}]', "not a message"),  # of the other direction
        (b'[0,0,{"type":"Pong"}]', "not a message"),
        (b'["x",0,{"type":"Warned"}]', "not a message"),
        (b'[0,0,{"type":"Lines","file":"a","offset":-1,"text":""}]', "not a message"),
        (
            b'[0,0,{"type":"Pong","sent_ns":1,"received_ns":1,"answered_ns":1,"more":1}]',
            "not a message",
        ),
        (b"\xff\xfe", "not a message"),
    ],
)
def test_what_is_sealed_well_and_no_message_is_refused(body: bytes, why: str) -> None:
    coordinator, agent, below = linked()
    below.sendall(framed(agent._sending.seal(body)))
    with pytest.raises(MessageError, match=why):
        taken(coordinator)


def test_a_message_without_end_is_cut_off() -> None:
    coordinator, _, below = linked()
    below.sendall(LENGTH.pack(2 * LONGEST))
    with pytest.raises(MessageError, match="a message of"):
        taken(coordinator)
    coordinator.close()


@settings(max_examples=50, deadline=None)
@given(data=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5))
def test_a_link_survives_any_bytes_with_a_refusal(data: list[bytes]) -> None:
    one, two = socket.socketpair()
    link = Link(one, b"k", agent=False)
    with two:
        two.sendall(b"".join(data) + b"\n")
        with pytest.raises((MessageError, ConnectionError)):
            two.shutdown(socket.SHUT_WR)
            while True:
                link.take()
    link.close()


def test_a_link_waits_for_nobody() -> None:
    coordinator, agent, _ = linked()
    beat = Beat(time_ns=1, marks={f"w{n}": (0,) * 8 for n in range(1000)}, states={})
    for _ in range(400):
        agent.put(beat)
        agent.flush()
    assert agent.waiting > 0, "the other side reads nothing"
    coordinator.close()


# ---- the listener


@pytest.fixture
def listener() -> Iterator[tuple[AgentListener, list[str]]]:
    refused: list[str] = []
    listener = AgentListener(("127.0.0.1", 0), TOKEN, refused=lambda why, node: refused.append(why))
    yield listener, refused
    listener.close()


def dial(listener: AgentListener, token: bytes = TOKEN) -> Link:
    sock = socket.create_connection(listener.address, timeout=LIMIT_S)
    return Link(sock, handshake.enter(sock, token, limit_s=LIMIT_S), agent=True)


def entered(listener: AgentListener) -> list[tuple[Link, Any]]:
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        if found := listener.enter():
            return found
        threading.Event().wait(0.005)
    raise AssertionError("nobody came in")


def test_strangers_who_say_nothing_delay_nobody(
    listener: tuple[AgentListener, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited until they are turned away would wait for ever, and an agent waits no longer
    than its limit for those who are closed for the next.
    """
    assert listening.PATIENCE_S < auth.LIMIT_S / 2
    monkeypatch.setattr(listening, "LIMIT_S", 3600.0)
    silent = [
        socket.create_connection(listener[0].address) for _ in range(listening.STRANGERS + 10)
    ]
    link = dial(listener[0])
    link.put(HELLO)
    link.flush()
    assert entered(listener[0])[0][1].frame == HELLO
    for sock in silent:
        sock.close()


def test_all_agents_that_dial_at_once_come_in(
    listener: tuple[AgentListener, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is thrown out for the next one."""
    monkeypatch.setattr(listening, "STRANGERS", 4)
    links: list[Link] = []

    def come() -> None:
        link = dial(listener[0])
        link.put(HELLO)
        link.flush()
        links.append(link)

    herd = [threading.Thread(target=come) for _ in range(20)]
    for agent in herd:
        agent.start()
    came = 0
    while came < len(herd):
        came += len(entered(listener[0]))
    for agent in herd:
        agent.join(LIMIT_S)
    assert len(links) == len(herd) and not listener[1]
    for link in links:
        link.close()


def test_a_stranger_that_stops_in_the_middle_is_let_go_of(
    listener: tuple[AgentListener, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "LIMIT_S", 0.2)
    proven = dial(listener[0])
    with socket.create_connection(listener[0].address, timeout=LIMIT_S) as sock:
        sock.sendall(struct.pack("!I", 100))
        until(lambda: len(listener[1]) == 2)
    assert listener[1] == ["127.0.0.1: the other side did not say in time who it is"] * 2
    proven.close()


def test_who_was_hung_up_for_the_next_one_does_not_come_in(
    listener: tuple[AgentListener, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "STRANGERS", 1)
    monkeypatch.setattr(listening, "PATIENCE_S", 0.0)
    first = dial(listener[0])
    second = dial(listener[0])
    until(lambda: len(listener[1]) == 1)
    assert "it took too long" in listener[1][0]
    for link in (first, second):
        link.put(HELLO)
        with suppress(OSError):
            link.flush()
    assert len(entered(listener[0])) == 1 and not listener[0].enter()
    for link in (first, second):
        link.close()


def test_whatever_a_stranger_says_the_next_one_is_heard(
    listener: tuple[AgentListener, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, *_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(auth.Admitting, "take", fails)
    with suppress(AuthenticationFailed, OSError):
        dial(listener[0])
    link = dial(listener[0])
    link.put(HELLO)
    link.flush()
    assert entered(listener[0])[0][1].frame == HELLO
    assert listener[1] == ["127.0.0.1: nobody thought of this"]
    link.close()


def test_no_more_descriptors_do_not_end_the_listener(
    listener: tuple[AgentListener, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(errno.EMFILE, "Too many open files")]
    accept = socket.socket.accept

    def refuses(self: socket.socket) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", refuses)
    link = dial(listener[0])
    link.put(HELLO)
    link.flush()
    assert entered(listener[0])[0][1].frame == HELLO
    assert listener[1] == ["a connection could not be accepted: Too many open files"]
    link.close()


def test_who_is_turned_away_is_logged_with_why(listener: tuple[AgentListener, list[str]]) -> None:
    with suppress(AuthenticationFailed, OSError):
        dial(listener[0], b"f" * 32)
    with socket.create_connection(listener[0].address) as http:
        http.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: len(listener[1]) == 2)
    link = dial(listener[0])
    link.put(Ping(sent_ns=1))
    link.flush()
    until(lambda: len(listener[1]) == 3)
    assert "does not know the run's token" in listener[1][0]
    assert "over 4096" in listener[1][1] and listener[1][1].startswith("127.0.0.1: ")
    assert "not a message" in listener[1][2], "a coordinator's word, from an agent"


def test_who_does_not_know_the_token_is_named_by_address_and_node(
    listener: tuple[AgentListener, list[str]],
) -> None:
    with socket.create_connection(listener[0].address, timeout=LIMIT_S) as sock:
        with pytest.raises(TokenRefused, match=r"^the token was refused$"):
            handshake.enter(sock, b"f" * 32, node=7)
        until(lambda: bool(listener[1]))
    assert listener[1] == [
        "127.0.0.1, which says that it is node 7: the other side does not know the run's token"
    ]


@pytest.mark.parametrize("node", ["-1", '"1\\n2"', "[]"])
def test_a_made_up_node_is_no_number_of_one(
    listener: tuple[AgentListener, list[str]], node: str
) -> None:
    nonce = "0" * 64
    body = f'{{"version":{VERSION},"nonce":"{nonce}","mac":"","node":{node}}}'
    with socket.create_connection(listener[0].address, timeout=LIMIT_S) as sock:
        sock.sendall(framed(body.encode()))
        until(lambda: bool(listener[1]))
    (why,) = listener[1]
    assert "not a message:" in why and "$.node" in why and "\n" not in why


def test_another_version_is_not_told_what_it_may_not_know() -> None:
    left, right = socket.socketpair()
    with left, right:
        thread = threading.Thread(
            target=lambda: suppressed(handshake.enter, right, TOKEN, node=3), daemon=True
        )
        thread.start()
        until_s = time.monotonic() + LIMIT_S
        auth._send(left, packed(auth._Challenge(version=VERSION - 1, nonce="0" * 64)), until_s)
        said = receive(left, json.loads, LONGEST, until_s)
        thread.join(LIMIT_S)
    assert said.keys() == {"version", "nonce", "mac"}


def test_whoever_does_not_say_hello_first_is_turned_away(
    listener: tuple[AgentListener, list[str]],
) -> None:
    link = dial(listener[0])
    link.put(Beat(time_ns=1, marks={}, states={}))
    link.flush()
    until(lambda: bool(listener[1]))
    assert "Beat before it said who it is" in listener[1][0]


def test_the_token_is_never_sent() -> None:
    heard: list[bytes] = []
    one, two = socket.socketpair()
    three, four = socket.socketpair()

    def listen(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                heard.append(data)
                target.sendall(data)

    for ends in ((two, three), (three, two)):
        threading.Thread(target=listen, args=ends, daemon=True).start()
    thread = threading.Thread(target=admit, args=(one, TOKEN), daemon=True)
    thread.start()
    key = handshake.enter(four, TOKEN)
    thread.join(LIMIT_S)
    for sock in (one, two, three, four):
        sock.close()
    said = b"".join(heard)
    assert len(said) > 200 and json.loads(heard[0][4:])["version"] == VERSION
    for secret in (TOKEN, TOKEN.hex().encode(), key, key.hex().encode()):
        assert secret not in said
