"""What has to arrive arrives once and in order, whatever becomes of the connections;
clocks; files.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from tests.support.fakes.orders import join as order
from trainchaos.recovery.nodes.link.clock import DRIFT, REPEAT_S, ClockWatch
from trainchaos.recovery.nodes.link.files import CHUNK, FileTail, land
from trainchaos.recovery.nodes.link.link import READ, Link, Parcel, Post
from trainchaos.recovery.nodes.link.protocol import TOGETHER, Lines, Ping, Signal, Sinking, Tell
from trainchaos.recovery.transport.stream import MessageError, packed
from trainchaos.recovery.transport.wire import Abort, Extra, Join, LeaveOut, Message, Stop


def linked() -> tuple[Link, Link]:
    """A coordinator and an agent."""
    one, two = socket.socketpair()
    return Link(one, b"k", agent=False), Link(two, b"k", agent=True)


def number_of(parcel: Parcel) -> int:
    return int(parcel.frame.process)


def test_a_gap_is_refused() -> None:
    post = Post(limit=10)
    assert post.accept(Parcel(number=1, got=0, frame=None))
    assert not post.accept(Parcel(number=1, got=0, frame=None)), "doubled"
    assert post.accept(Parcel(number=0, got=0, frame=None)), "one that may be lost"
    with pytest.raises(MessageError, match="message 3 came where 2 was due"):
        post.accept(Parcel(number=3, got=0, frame=None))


def test_a_post_for_another_receiver_begins_anew() -> None:
    post = Post(limit=10)
    for name in "abc":
        post.add(Sinking(process=name))
    post.confirmed(1)
    post.received = 7
    post.renumber()
    coordinator, agent = linked()
    post.pump(agent)
    agent.flush()
    parcels = coordinator.take()
    assert [(p.number, p.got, p.frame.process) for p in parcels] == [(1, 0, "b"), (2, 0, "c")]


def test_a_post_says_when_too_much_waits() -> None:
    post = Post(limit=2)
    for name in "abc":
        assert not post.full
        post.add(Sinking(process=name))
    assert post.full
    post.confirmed(1)
    assert not post.full and len(post) == 2


# ---- clocks

SECOND = 1_000_000_000


def asked(watch: ClockWatch, at_ns: int, *, true_ns: int, there_ns: int, back_ns: int) -> None:
    """A question at a time, with known delays, to a clock with a known offset."""
    received = at_ns + there_ns + true_ns
    watch.answered(
        sent_ns=at_ns,
        received_ns=received,
        answered_ns=received + 5,
        back_ns=at_ns + there_ns + 5 + back_ns,
    )


@given(
    true_ns=st.integers(-(10**15), 10**15),
    delays=st.lists(
        st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)), min_size=1, max_size=40
    ),
)
def test_the_offset_is_within_its_bound(true_ns: int, delays: list[tuple[int, int]]) -> None:
    watch, now_ns = ClockWatch(), SECOND
    for there_ns, back_ns in delays:
        asked(watch, now_ns, true_ns=true_ns, there_ns=there_ns, back_ns=back_ns)
        now_ns += there_ns + back_ns + 5
        found = watch.offset(now_ns)
        assert found is not None
        assert abs(found.offset_ns - true_ns) <= found.bound_ns


def test_the_best_answer_counts_until_it_is_old() -> None:
    watch = ClockWatch()
    asked(watch, 0, true_ns=1000, there_ns=100, back_ns=100)
    asked(watch, SECOND // 100, true_ns=1000, there_ns=20_000, back_ns=60_000)
    found = watch.offset(SECOND // 100)
    assert found is not None and found.offset_ns == 1000
    assert found.bound_ns == pytest.approx(100 + SECOND // 100 * DRIFT, rel=0.01)
    # A minute later the bound of the first has grown beyond that of a worse, but newer one.
    asked(watch, 60 * SECOND, true_ns=1000, there_ns=20_000, back_ns=20_000)
    newer = watch.offset(60 * SECOND)
    assert newer is not None and newer.bound_ns < 30_000


def test_news_of_a_clock_are_rare() -> None:
    watch = ClockWatch()
    assert watch.changed(0) is None
    told = []
    for second in range(200):
        jump_ns = 10**9 if second >= 101 else 0
        asked(watch, second * SECOND, true_ns=jump_ns, there_ns=1000, back_ns=1000)
        if watch.changed(second * SECOND):
            told.append(second)
    every = int(REPEAT_S)
    assert told[: 100 // every] == list(range(0, 100, every))
    assert 101 in told, "a clock that jumped is told of at once"
    assert len(told) < 200 // every + 3


def test_answers_that_cannot_be_count_for_nothing() -> None:
    watch = ClockWatch()
    watch.answered(sent_ns=100, received_ns=50, answered_ns=40, back_ns=200)
    watch.answered(sent_ns=100, received_ns=50, answered_ns=500, back_ns=200)
    assert watch.offset(1000) is None


# ---- files


def sent(tail: FileTail, *, last: bool = False) -> list[Lines]:
    found = [piece() for piece in tail.new(last=last)]
    assert all(isinstance(lines, Lines) for lines in found)
    return found  # type: ignore[return-value]


def test_a_file_arrives_byte_for_byte_and_its_lines_whole(tmp_path: Path) -> None:
    source, there = tmp_path / "w0.jsonl", tmp_path / "run"
    tail = FileTail(source, "events/w0.jsonl", whole_lines=True)
    assert sent(tail) == []
    data = b""
    for part in (b"one\n", b"two", b"\n\xff\x00\r\n", b"x" * CHUNK + b"\n", b"torn"):
        data += part
        source.write_bytes(data)
        for lines in sent(tail):
            land(there, lines)
        assert (there / "events/w0.jsonl").read_bytes() == data[: data.rfind(b"\n") + 1]
    for lines in sent(tail, last=True):
        land(there, lines)
    assert (there / "events/w0.jsonl").read_bytes() == data


def test_what_lands_twice_or_late_changes_nothing(tmp_path: Path) -> None:
    one, two = Lines(file="a", offset=0, text="one\n"), Lines(file="a", offset=4, text="two\n")
    for lines in (one, two, one, two, one):
        land(tmp_path, lines)
    assert (tmp_path / "a").read_text() == "one\ntwo\n"
    land(tmp_path, Lines(file="a", offset=100, text="late\n"))
    assert (tmp_path / "a").read_text() == "one\ntwo\n", "after a gap nothing is written"


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", "."])
def test_nothing_lands_outside(tmp_path: Path, name: str) -> None:
    with pytest.raises((MessageError, OSError)):
        land(tmp_path / "run", Lines(file=name, offset=0, text="x"))
    assert not (tmp_path / "x").exists()


def test_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        land(tmp_path / "run", Lines(file="a", offset=0, text="x"))
    assert not (tmp_path / "victim").exists()


def test_text_that_is_no_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MessageError, match="that are none"):
        land(tmp_path, Lines(file="a", offset=0, text="€"))


def test_reading_a_message_maps_no_memory() -> None:
    """Room of 128 KB and more is mapped anew for each message, which took longer than all else."""
    assert READ < 128 << 10


# ---- messages to several processes of one node


def join(rank: int) -> Join:
    return order(7, rank=rank, world=1024, store_port=4711, timeout_s=60.0, left_out=3)


def test_pieces_of_what_is_left_out_are_counted_as_long_as_they_are() -> None:
    samples, since = list(range(10**8, 10**8 + 4096)), [10**6] * 4096
    pieces = [LeaveOut(after=4096 * n, samples=samples, since=since) for n in range(80)]
    lines = list(Tell.of(("w0", piece) for piece in pieces))
    assert [message for line in lines for _, message in line.messages()] == pieces
    assert len(lines) > 1 and all(len(packed(line)) < 1.1 * TOGETHER for line in lines)


def passed(outbox: Post) -> list[Tell]:
    """Lines that an agent gets."""
    one, two = linked()
    outbox.pump(one)
    one.flush()
    return [parcel.frame for parcel in two.take()]


def test_one_decision_to_all_processes_of_a_node_is_one_line() -> None:
    outbox = Post(limit=10)
    for rank in range(64):
        outbox.tell(f"w{rank}", Abort(generation=7), needed=True)
    assert outbox.waits
    (line,) = passed(outbox)
    assert line.messages() == [(f"w{rank}", Abort(generation=7)) for rank in range(64)]
    outbox.confirmed(1)
    assert not outbox.waits


def test_the_order_is_kept_between_messages_and_all_else() -> None:
    outbox = Post(limit=10)
    outbox.tell("w0", Abort(generation=1))
    outbox.add(Signal(process="w0", signum=9))
    outbox.tell("w0", Stop())
    outbox.tell("w1", Abort(generation=1))
    assert [frame.messages() if isinstance(frame, Tell) else frame for frame in passed(outbox)] == [
        [("w0", Abort(generation=1))],
        Signal(process="w0", signum=9),
        [("w0", Stop()), ("w1", Abort(generation=1))],
    ]


def test_only_what_is_needed_is_waited_for() -> None:
    outbox = Post(limit=10)
    outbox.tell("w0", Extra(topic="t", payload={}))
    outbox.add(Ping(sent_ns=1))
    assert not outbox.waits
    outbox.tell("w0", Stop(), needed=True)
    assert outbox.waits
    outbox.add(Ping(sent_ns=2))
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
    sender, receiver = Post(limit=10_000), Post(limit=10_000)
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
