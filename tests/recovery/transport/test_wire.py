"""Messages between supervisor and ranks: what is sent arrives, and nothing else is taken for a
message.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.support.fakes.orders import join
from trainchaos.recovery.policy.interval import Rewinds
from trainchaos.recovery.transport import wire
from trainchaos.recovery.transport.channel import LONGEST, Channel
from trainchaos.recovery.transport.stream import MessageError, encoded, framed, packed
from trainchaos.recovery.transport.wire import Abort, Extra, Message, Ready

LARGEST = {
    "store_port": 47111,
    "timeout_s": 60.0,
    "generation": 10**6,
    "rank": 16383,
    "world": 16384,
    "source": 16382,
    "finish": 10**7,
    "examine": 10**7,
}
MESSAGES = [
    wire.LeaveOut(after=0, samples=[4, 17], since=[3, 9]),
    wire.StandBy(generation=3, lost=1, group="w0.s0", rank=1, world=2, store_port=4711),
    wire.StoodBy(generation=3, group="w0.s0"),
    join(3, rank=1, world=2, source=0, receives=True),
    join(restore=True, doubts=[(3, 50)], rewinds=Rewinds(count=1, failures=2, watched_s=9.5)),
    Abort(generation=2),
    wire.PauseRequest(),
    wire.PauseRequest(save=True),
    wire.Stop(),
    wire.Inquiry(),
    wire.Status(place="training", generation=2, step=55, valid=True),
    Extra(topic="arm", payload={"points": [{"step": 1, "phase": "data"}], "x": None, "nan": "NaN"}),
    Ready(),
    wire.Parked(
        generation=2, step=56, valid=True, why="nonfinite", blamed=[0, 3], error="one\ntwo"
    ),
    wire.Joined(generation=2, step=56, checkpoint=None),
    wire.CheckpointNote(state="committed", checkpoint="step-00000020", step=20),
    wire.SetAside(doubts=[(3, 50), (7, 80)]),
    wire.Digest(generation=2, step=20, digest="00ff"),
    wire.Failed(error="ValueError: no"),
    wire.Notice(),
    wire.Agreed(step=20),
    wire.Unrecoverable(error="nothing is left to restore"),
    wire.Finished(step=100),
    wire.Feed(spare="s4", address="127.0.0.1 4711 00ff"),
    wire.Follow(shard=1),
    wire.Following(shard=1, live="127.0.0.1 4711 00ff"),
    wire.Settle(),
    wire.Settled(step=-1),
    wire.Recall(number=3),
    wire.Recalled(
        number=3,
        rank=1,
        entries=[
            wire.CollectiveEntry(
                group="generation-2", seq=14, op="all_reduce", sizes="7 Float", state="started"
            )
        ],
        begun=2,
    ),
]


def test_a_rank_of_many_is_told_no_more_than_one_of_few() -> None:
    few, many = join(store_port=47111, timeout_s=60.0), join(**LARGEST)
    assert len(packed(many)) < len(packed(few)) + 100 < 360


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    left.settimeout(120)
    right.settimeout(120)
    pair = Channel(left), Channel(right)
    yield pair
    for channel in pair:
        channel.close()


def receive(channel: Channel, count: int) -> list[object]:
    """That many messages."""
    got: list[object] = []
    while len(got) < count:
        messages = channel.receive()
        assert messages is not None, "the other side closed"
        got.extend(messages)
    return got


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was_sent(ends: tuple[Channel, Channel], message: Message) -> None:
    assert ends[0].send(message)
    assert receive(ends[1], 1) == [message]


def test_every_message_type_is_tried_here() -> None:
    assert {type(m) for m in MESSAGES} == {*get_args(wire.ToRank | wire.FromRank)}


def test_torn_messages_are_put_together(ends: tuple[Channel, Channel]) -> None:
    data = b"".join(map(packed, MESSAGES))
    got: list[object] = []
    for byte in data:
        ends[0].sock.sendall(bytes((byte,)))
        messages = ends[1].receive()
        assert messages is not None
        got.extend(messages)
    assert got == MESSAGES


def test_many_at_once_keep_their_order(ends: tuple[Channel, Channel]) -> None:
    for start in range(0, 1000, 20):
        batch = [Abort(generation=number) for number in range(start, start + 20)]
        for message in batch:
            assert ends[0].send(message)
        assert receive(ends[1], 20) == batch


@pytest.mark.parametrize(
    "line",
    [
        b"hello",
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"type": "bye"}',
        b'{"type": "Abort"}',
        b'{"type": "Abort", "generation": "two"}',
        b'{"type": "Abort", "generation": 2, "more": 1}',
        b'{"type": "Parked", "generation": 1, "step": 1, "valid": true, "why": "tired"}',
        b'{"type": "Abort", "generation": 2',
        b"\xff\xfe\x00",
        b"GET / HTTP/1.1\r",
        b'{"type":"Abort","generation":' + b"[" * 5000,
    ],
)
def test_garbage_is_refused(ends: tuple[Channel, Channel], line: bytes) -> None:
    ends[0].sock.sendall(framed(line))
    with pytest.raises(MessageError, match="not a message"):
        ends[1].receive()


def test_a_pickle_is_garbage_and_never_loaded(
    ends: tuple[Channel, Channel], tmp_path: Path
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    ends[0].sock.sendall(framed(pickle.dumps(Bomb())))
    with pytest.raises(MessageError):
        ends[1].receive()
    assert not (tmp_path / "ran").exists()


def test_an_endless_message_is_refused_before_it_fills_the_memory(
    ends: tuple[Channel, Channel],
) -> None:
    message = framed(encoded(Extra(topic="x" * LONGEST, payload={})))
    ends[0].sock.sendall(message[: 1 << 14])
    with pytest.raises(MessageError, match=f"over {LONGEST}"):
        ends[1].receive()


def test_the_other_side_going_away_is_none(ends: tuple[Channel, Channel]) -> None:
    ends[0].send(Ready())
    ends[0].close()
    assert ends[1].receive() == [Ready()]
    assert ends[1].receive() is None


def test_sending_to_nobody_says_so(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    assert not ends[0].send(Ready())


def test_a_torn_last_message_is_no_message(ends: tuple[Channel, Channel]) -> None:
    ends[0].sock.sendall(packed(Ready())[:-3])
    ends[0].close()
    assert ends[1].receive() == []
    assert ends[1].receive() is None


def test_a_receiver_that_reads_nothing_cannot_hold_up_the_sender() -> None:
    left, right = socket.socketpair()
    with left, right:
        sender = Channel(left, send_limit_s=0.05)
        assert sender.send(Ready())
        assert not all(sender.send(Extra(topic="x" * 10_000, payload={})) for _ in range(200))


def test_a_limit_on_sending_is_none_on_receiving() -> None:
    left, right = socket.socketpair()
    with left, right:
        receiver = Channel(left, send_limit_s=0.001)
        assert receiver.receive() == []
        right.sendall(packed(Ready()))
        assert receive(receiver, 1) == [Ready()]


def test_a_channel_without_data_is_no_error(ends: tuple[Channel, Channel]) -> None:
    ends[1].sock.setblocking(False)
    assert ends[1].receive() == []
