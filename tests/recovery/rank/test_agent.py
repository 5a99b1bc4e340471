"""The listening half of a rank: orders are queued, flags set, a broken group is left in time."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fakes.orders import join
from tests.support.running import LIMIT_S, readable
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.wire import (
    Abort,
    Digest,
    Extra,
    Inquiry,
    Recall,
    Recalled,
    Status,
    Stop,
)

JOIN = join(2)


class FakeGroup:
    """Counts aborts."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.aborts = 0
        self.aborted = threading.Event()
        self.twice = threading.Event()

    def abort(self) -> int:
        self.aborts += 1
        self.aborted.set()
        if self.aborts > 1:
            self.twice.set()
        return 0

    def unfinished(self) -> int:
        return 2


class Rig:
    """An agent, and the supervisor's end of its channel."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.orphaned = threading.Event()
        self.extras: list[tuple[str, dict[str, Any]]] = []
        self.agent = RankAgent(Channel(theirs), orphaned=self.orphaned.set)
        self.agent.on_extra = lambda topic, payload: self.extras.append((topic, payload))
        self.agent.start()

    def order(self) -> object:
        return self.agent.orders.get(timeout=LIMIT_S)

    def settle(self) -> None:
        """Everything sent before has been handled."""
        self.channel.send(Stop())
        while not isinstance(self.order(), Stop):
            pass


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.channel.close()
    assert rig.orphaned.wait(LIMIT_S)


def test_orders_are_kept_in_order(rig: Rig) -> None:
    for message in (JOIN, Abort(generation=2), Stop()):
        rig.channel.send(message)
    assert [rig.order() for _ in range(3)] == [JOIN, Abort(generation=2), Stop()]


def test_what_is_not_for_the_recovery_stack_is_passed_on(rig: Rig) -> None:
    rig.channel.send(Extra(topic="arm", payload={"points": []}))
    rig.settle()
    assert rig.extras == [("arm", {"points": []})]


def test_an_abort_breaks_the_group_until_the_training_thread_is_out_of_it(rig: Rig) -> None:
    group = FakeGroup(1)
    rig.agent.entering(group)
    rig.channel.send(Abort(generation=1))
    assert group.twice.wait(LIMIT_S), "once may be too early: it may just be opening a connection"
    assert rig.agent.heard.aborted_generation == 1
    rig.agent.left()
    rig.settle()
    aborts = group.aborts
    rig.settle()
    assert group.aborts == aborts


def test_an_abort_of_an_earlier_generation_spares_the_current_one(rig: Rig) -> None:
    group = FakeGroup(3)
    rig.agent.entering(group)
    rig.channel.send(Abort(generation=2))
    rig.settle()
    assert group.aborts == 0
    assert rig.agent.heard.aborted_generation == 2 < group.generation


def test_a_new_group_is_not_broken_by_the_abort_that_ended_the_last(rig: Rig) -> None:
    old = FakeGroup(1)
    rig.agent.entering(old)
    rig.channel.send(Abort(generation=1))
    assert old.aborted.wait(LIMIT_S)
    rig.agent.left()
    new = FakeGroup(2)
    rig.agent.entering(new)
    rig.settle()
    assert new.aborts == 0


def test_a_rank_whose_supervisor_is_gone_ends() -> None:
    rig = Rig()
    rig.channel.close()
    assert rig.orphaned.wait(LIMIT_S)


@pytest.mark.parametrize("garbage", [b"hello\n", b'{"type": "reboot"}\n'])
def test_a_rank_whose_supervisor_talks_nonsense_ends(garbage: bytes) -> None:
    rig = Rig()
    rig.channel.sock.sendall(garbage)
    assert rig.orphaned.wait(LIMIT_S)


def test_by_default_an_orphan_ends_its_process() -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        agent = RankAgent(Channel(theirs))
        agent._listen()
        os._exit(0)
    theirs.close()
    ours.close()
    fd = os.pidfd_open(pid)
    try:
        result = os.waitid(os.P_PIDFD, fd, os.WEXITED)
    finally:
        os.close(fd)
    assert result is not None
    assert result.si_status == 70


def test_an_answer_has_the_number_of_its_inquiry_and_a_join_is_known_before_it_is_taken(
    rig: Rig,
) -> None:
    rig.agent.status = lambda number: Status(
        place="waiting",
        generation=rig.agent.heard.told_generation,
        step=7,
        valid=True,
        number=number,
    )
    rig.channel.send(JOIN)
    rig.channel.send(Inquiry(number=5))
    assert readable(rig.channel), "it does not answer"
    (answer,) = rig.channel.receive() or ()
    assert isinstance(answer, Status) and (answer.number, answer.generation) == (5, JOIN.generation)
    assert rig.order() == JOIN


def test_the_last_digest_is_repeated_to_who_takes_over_before_the_status(rig: Rig) -> None:
    rig.agent.status = lambda number: Status(
        place="training", generation=1, step=8, valid=True, number=number
    )
    rig.agent.digest = Digest(generation=1, step=8, digest="d")
    rig.channel.send(Inquiry(number=5))
    said: list[object] = []
    while len(said) < 2:
        assert readable(rig.channel), "it does not answer"
        said += rig.channel.receive() or ()
    assert said[0] == rig.agent.digest and isinstance(said[1], Status)


def test_a_recall_is_answered_while_orders_go_on(rig: Rig) -> None:
    held, asked = threading.Event(), list[int]()

    def recall(number: int) -> Recalled:
        asked.append(number)
        assert held.wait(LIMIT_S)
        return Recalled(number=number, rank=3, entries=[], why="none")

    rig.agent.recall = recall
    rig.agent.entering(FakeGroup(1))
    rig.channel.send(Recall(number=7))
    rig.settle()  # although the first recall is held up
    rig.channel.send(Recall(number=8))  # not answered: the first one still is
    rig.settle()
    held.set()
    found: list[Any] = []
    while not found:
        assert readable(rig.channel.fileno())
        found = rig.channel.receive() or []
    assert found == [Recalled(number=7, rank=3, entries=[], why="none", begun=2)]
    assert asked == [7]


def test_a_rank_without_a_recorder_does_not_answer(rig: Rig) -> None:
    rig.channel.send(Recall(number=1))
    rig.settle()
    assert not readable(rig.channel.fileno(), 0)
