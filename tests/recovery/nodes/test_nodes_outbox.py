"""Messages to several processes of one node: one line, in order, each once, whatever becomes of
connections.
"""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from tests.support.fakes.orders import join as order
from trainchaos.recovery.nodes.coordinator.outbox import Outbox
from trainchaos.recovery.nodes.link.handshake import Keys
from trainchaos.recovery.nodes.link.link import Link, Post
from trainchaos.recovery.nodes.link.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    TOGETHER,
    Ping,
    Signal,
    Tell,
)
from trainchaos.recovery.transport.stream import MessageError, packed
from trainchaos.recovery.transport.wire import Abort, Extra, Join, LeaveOut, Message, Stop

KEYS = Keys(sending=b"s", receiving=b"r")


def linked() -> tuple[Link, Link]:
    """Of a coordinator and of an agent."""
    one, two = socket.socketpair()
    agents = Keys(sending=KEYS.receiving, receiving=KEYS.sending)
    return Link(one, KEYS, FROM_AGENT), Link(two, agents, FROM_COORDINATOR)


def join(rank: int) -> Join:
    return order(7, rank=rank, world=1024, store_port=4711, timeout_s=60.0, left_out=3)


def test_pieces_of_what_is_left_out_are_counted_as_long_as_they_are() -> None:
    samples, since = list(range(10**8, 10**8 + 4096)), [10**6] * 4096
    pieces = [LeaveOut(after=4096 * n, samples=samples, since=since) for n in range(80)]
    lines = list(Tell.of(("w0", piece) for piece in pieces))
    assert [message for line in lines for _, message in line.messages()] == pieces
    assert len(lines) > 1 and all(len(packed(line)) < 1.1 * TOGETHER for line in lines)


def passed(outbox: Outbox) -> list[Tell]:
    """Lines that an agent gets."""
    one, two = linked()
    outbox.pump(one)
    one.flush()
    return [parcel.frame for parcel in two.take()]


def test_one_decision_to_all_processes_of_a_node_is_one_line() -> None:
    outbox = Outbox(limit=10)
    for rank in range(64):
        outbox.tell(f"w{rank}", Abort(generation=7), needed=True)
    assert outbox.waits
    (line,) = passed(outbox)
    assert line.messages() == [(f"w{rank}", Abort(generation=7)) for rank in range(64)]
    outbox.confirmed(1)
    assert not outbox.waits


def test_the_order_is_kept_between_messages_and_all_else() -> None:
    outbox = Outbox(limit=10)
    outbox.tell("w0", Abort(generation=1))
    outbox.put(Signal(process="w0", signum=9))
    outbox.tell("w0", Stop())
    outbox.tell("w1", Abort(generation=1))
    assert [frame.messages() if isinstance(frame, Tell) else frame for frame in passed(outbox)] == [
        [("w0", Abort(generation=1))],
        Signal(process="w0", signum=9),
        [("w0", Stop()), ("w1", Abort(generation=1))],
    ]


def test_only_what_is_needed_is_waited_for() -> None:
    outbox = Outbox(limit=10)
    outbox.tell("w0", Extra(topic="t", payload={}))
    outbox.put(Ping(sent_ns=1))
    assert not outbox.waits
    outbox.tell("w0", Stop(), needed=True)
    assert outbox.waits
    outbox.put(Ping(sent_ns=2))
    outbox.tell("w0", Extra(topic="t", payload={}))
    passed(outbox)
    outbox.confirmed(3)
    assert not outbox.waits and len(outbox) == 2


def test_nonsense_is_found_where_it_is_read() -> None:
    tell = Tell(each=(("w0", Raw(b'{"type":"Abort","generation":"soon"}')),))
    with pytest.raises(MessageError, match="not a message"):
        tell.messages()


@pytest.mark.slow
@settings(max_examples=settings().max_examples * 2 // 5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_message_arrives_once_and_in_order_over_any_connections(seed: int) -> None:
    dice = random.Random(seed)
    sender, receiver = Outbox(limit=10_000), Post(limit=10_000)
    said: list[tuple[str, Message]] = []
    heard: list[tuple[str, Message]] = []
    while len(said) < 150 or len(heard) < len(said):
        one, two = linked()
        sender.reconnected()
        for _ in range(dice.randrange(1, 8)):
            for _ in range(dice.randrange(12) if len(said) < 150 else 0):
                said.append(
                    (
                        f"w{dice.randrange(4)}",
                        dice.choice([Abort(generation=len(said)), join(len(said))]),
                    )
                )
                sender.tell(*said[-1], needed=dice.random() < 0.5)
            sender.pump(one)
            if dice.random() < 0.7:
                one.flush()
            for parcel in two.take():
                if receiver.accept(parcel):
                    heard += parcel.frame.messages()
            if dice.random() < 0.5:
                sender.confirmed(receiver.received)
        for link in (one, two):
            link.close()
    assert heard == said
