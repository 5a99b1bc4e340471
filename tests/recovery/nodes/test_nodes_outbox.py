"""Messages to several processes of one node: one line, in order, each once, whatever becomes of
connections.
"""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainchaos.recovery.nodes.coordinator.outbox import Outbox
from trainchaos.recovery.nodes.link.bundle import LONGEST, Letter, apart, together
from trainchaos.recovery.nodes.link.handshake import Keys, ProtocolViolation
from trainchaos.recovery.nodes.link.link import Link, Post
from trainchaos.recovery.nodes.link.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    MAX_LINE,
    Heard,
    Ping,
    Signal,
    Tell,
)
from trainchaos.recovery.transport.wire import Abort, Extra, Join, LeaveOut, Message, Parked, Stop

KEYS = Keys(sending=b"s", receiving=b"r")


def linked() -> tuple[Link, Link]:
    """Of a coordinator and of an agent."""
    one, two = socket.socketpair()
    agents = Keys(sending=KEYS.receiving, receiving=KEYS.sending)
    return Link(one, KEYS, FROM_AGENT), Link(two, agents, FROM_COORDINATOR)


def join(rank: int) -> Join:
    return Join(
        generation=7,
        rank=rank,
        world=1024,
        store_port=4711,
        restore=False,
        timeout_s=60.0,
        left_out=3,
    )


def test_pieces_of_what_is_left_out_are_counted_as_long_as_they_are() -> None:
    pieces = [
        LeaveOut(after=4096 * n, samples=list(range(10**8, 10**8 + 4096)), since=[10**6] * 4096)
        for n in range(80)
    ]
    lines = list(together([Letter("w0", piece) for piece in pieces], Tell))
    assert [message for line in lines for _, message in apart(line)] == pieces
    assert len(lines) > 1 and all(len(line.model_dump_json()) < MAX_LINE for line in lines)


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
    assert apart(line) == [(f"w{rank}", Abort(generation=7)) for rank in range(64)]
    assert len(line.model_dump_json()) < 64 * 12
    outbox.confirmed(1)
    assert not outbox.waits


def test_what_messages_have_in_common_is_said_once() -> None:
    (line,) = together([Letter(f"w{rank}", join(rank)) for rank in range(64)], Tell)
    assert apart(line) == [(f"w{rank}", join(rank)) for rank in range(64)]
    assert line.each[5] == ("w5", {"rank": 5})
    alone = len(join(5).model_dump_json())
    assert len(line.model_dump_json()) < 0.2 * 64 * alone


def test_what_differs_from_a_message_to_many_is_all_that_is_said_apart() -> None:
    common = join(0)
    outbox = Outbox(limit=10)
    for rank in range(64):
        outbox.tell(f"w{rank}", common, {"rank": rank})
    (line,) = passed(outbox)
    assert apart(line) == [(f"w{rank}", join(rank)) for rank in range(64)]
    assert line.each[5] == ("w5", {"rank": 5}) and line.common.keys() == vars(common).keys() - {
        "rank"
    }


def test_the_same_answer_of_all_ranks_of_a_node_is_one_line() -> None:
    said = [
        Letter(f"w{rank}", Parked(generation=7, step=41, valid=True, why="aborted"))
        for rank in range(8)
    ]
    one, two = linked()
    for line in together(said, Heard):
        two.put(line)
    two.flush()
    (parcel,) = one.take()
    assert apart(parcel.frame) == [letter[:2] for letter in said]
    assert len(parcel.frame.model_dump_json()) < 2 * len(said[0].message.model_dump_json()) + 80


ABORT = Abort(generation=1)
SHARED = join(0)
OWN = st.fixed_dictionaries({}, optional={"rank": st.integers(0, 2), "feeds": st.just([1])})
MEANT = st.one_of(
    st.tuples(st.builds(Abort, generation=st.integers(1, 2)), st.just({})),
    st.tuples(st.just(ABORT), st.just({})),
    st.tuples(st.just(SHARED), OWN),
    st.tuples(st.builds(join, st.integers(0, 2)), st.just({})),
)
LETTERS = st.builds(lambda process, meant: Letter(process, *meant), st.sampled_from("abc"), MEANT)


@pytest.mark.slow
@given(st.lists(LETTERS, max_size=12))
def test_whatever_messages_share_they_arrive_as_they_were_meant(letters: list[Letter]) -> None:
    """Own fields or none, of one message or of several, of any kinds and in any order."""
    meant = [(process, message.varied(**own)) for process, message, own in letters]
    lines = list(together(letters, Tell))
    assert [letter for line in lines for letter in apart(line)] == meant


def test_a_line_is_no_longer_than_it_may_be() -> None:
    text = "x" * 100_000
    letters = [
        Letter("w0", Extra(topic=str(n), payload={"text": text + str(n)})) for n in range(40)
    ]
    lines = list(together(letters, Tell))
    assert [letter for line in lines for letter in apart(line)] == [one[:2] for one in letters]
    assert len(lines) == 4 and all(len(line.model_dump_json()) < 1.2 * LONGEST for line in lines)


def test_the_order_is_kept_between_messages_and_all_else() -> None:
    outbox = Outbox(limit=10)
    outbox.tell("w0", Abort(generation=1))
    outbox.put(Signal(process="w0", signum=9))
    outbox.tell("w0", Stop())
    outbox.tell("w1", Abort(generation=1))
    kinds = [
        [m.type for _, m in apart(f)] if isinstance(f, Tell) else f.type for f in passed(outbox)
    ]  # type: ignore[attr-defined]
    assert kinds == [["abort"], "signal", ["stop"], ["abort"]]


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
    tell = Tell(common={"type": "abort"}, each=(("w0", {"generation": "soon"}),))
    with pytest.raises(ProtocolViolation, match="not a message"):
        apart(tell)


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
                    heard += apart(parcel.frame)
            if dice.random() < 0.5:
                sender.confirmed(receiver.received)
        for link in (one, two):
            link.close()
    assert heard == said
