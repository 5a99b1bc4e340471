"""Groups that stand by in real processes: formed beside another, used, and left; with no harm to
what else the process has open.
"""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from tests.support.ranks import Self, ranks, results
from tests.support.running import LIMIT_S, until
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.storelink import StoreLink, connect
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.standby.aside import AsideGroup
from trainchaos.recovery.standby.book import StandbyBook
from trainchaos.recovery.standby.groups import StandbyGroups
from trainchaos.recovery.transport.wire import Message, StandBy, StoodBy

FIRST, SECOND = "w0.w1", "w1.w0"


def summed(group: Group) -> float:
    """The sum of all ranks, each giving 1 + its rank."""
    tensor = torch.full((1000,), 1.0 + group.rank)
    group.wait(group.start_all_reduce(tensor))
    return float(tensor[0])


def order(me: Self, name: str, *, lost: int = 0, generation: int = 1) -> StandBy:
    """To be part of a group, as a supervisor says it."""
    place = name.split(".").index(f"w{me.rank}")
    return StandBy(
        generation=generation, lost=lost, group=name, rank=place, world=2, store_port=me.port
    )


class Standing:
    """The groups of one process, and what it told."""

    def __init__(self, me: Self) -> None:
        self._me = me
        self._told = threading.Condition()
        self.answers: list[str] = []
        self.groups = StandbyGroups(self.make, self.tell)

    def make(self, order: StandBy, *, check: object, link: StoreLink) -> AsideGroup:
        """As ``recovery.rank.generation`` does."""
        return AsideGroup(
            group=order.group,
            generation=order.generation,
            rank=order.rank,
            world=order.world,
            store_port=order.store_port,
            backend="gloo",
            timeout_s=LIMIT_S,
            check=check,
            link=link,
        )

    def tell(self, answer: StoodBy) -> None:
        """To the supervisor."""
        with self._told:
            self.answers.append(answer.group)
            self._told.notify_all()

    def until(self, *names: str) -> None:
        """All of these stand by."""
        with self._told:
            assert self._told.wait_for(lambda: set(names) <= set(self.answers), LIMIT_S), names


def trained_meanwhile(me: Self) -> list[float]:
    """Trains in a group, has two others formed meanwhile, uses one of them, and forms a third."""
    group = me.group(1)
    group.form()
    standing = Standing(me)
    standing.groups.ask(order(me, FIRST, lost=0))
    standing.groups.ask(order(me, SECOND, lost=1))
    found = [summed(group)]
    standing.until(FIRST, SECOND)
    found.append(summed(group))
    me.leave()
    ready = standing.groups.take(SECOND)
    assert ready is not None
    ready.adopt(2, lambda: None)
    ready.form()
    found.append(summed(ready))
    assert (ready.generation, ready.rank) == (2, 1 - me.rank)
    assert standing.groups.take(SECOND) is None, "taken"
    assert standing.groups.take(FIRST) is None, "void: another one was taken"
    standing.answers.clear()
    standing.groups.ask(order(me, FIRST, generation=2))
    standing.until(FIRST)
    standing.groups.ask(order(me, SECOND, generation=2))  # in its place, for the same loss
    standing.until(SECOND)
    standing.groups.close()
    found.append(summed(ready))
    ready.leave()
    me.settle()
    return found


@pytest.mark.slow
def test_a_group_that_stands_by_is_used_as_any_other() -> None:
    assert results(trained_meanwhile, 2) == [[3.0] * 4] * 2


def with_other_connections(me: Self) -> str:
    """While a group is formed, this process opens connections of its own."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        stop, opened = threading.Event(), list[socket.socket]()

        def open_more() -> None:
            while not stop.is_set():
                client = socket.create_connection(server.getsockname())
                opened.extend([client, server.accept()[0]])
                stop.wait(0.001)

        opening = threading.Thread(target=open_more)
        opening.start()
        standing = Standing(me)
        standing.groups.ask(order(me, FIRST))
        standing.until(FIRST)
        stop.set()
        opening.join(LIMIT_S)
        ready = standing.groups.take(FIRST)
        assert ready is not None and len(opened) > 2
        ready.adopt(2, lambda: None)
        summed(ready)
        me.say("formed")
        me.hear()
        broken = ready.abort()
        assert broken or me.rank, "its own connection"
        for client, accepted in zip(opened[::2], opened[1::2], strict=True):
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"
            client.close()
            accepted.close()
    with pytest.raises(GenerationLost):
        summed(ready)
    ready.leave()
    return "only its own"


def test_breaking_one_breaks_nothing_that_was_opened_while_it_was_formed() -> None:
    with ranks(with_other_connections, 2) as both:
        assert [one.said() for one in both] == ["formed"] * 2
        for one in both:  # the first breaks the only connection there is
            one.tell("go on")
            assert one.result() == "only its own"


def alone(me: Self) -> int:
    """Its peer never comes; the generation ends, and a group of the next one is formed."""
    standing = Standing(me)
    if me.rank == 0:
        standing.groups.ask(order(me, FIRST))
        assert standing.groups.take(FIRST) is None, "it is not formed"
    standing.groups.ask(order(me, SECOND, generation=2))
    standing.until(SECOND)
    late = standing.groups.take(SECOND)
    assert late is not None
    late.adopt(3, lambda: None)
    summed(late)
    late.leave()
    standing.groups.close()
    me.settle()
    return len(standing.answers)


def test_what_is_not_wanted_any_more_does_not_hold_up_the_next() -> None:
    assert results(alone, 2) == [1, 1]


def lost_its_peer(me: Self) -> str:
    """One of two that stand by is gone: the other notices once it uses the group."""
    standing = Standing(me)
    standing.groups.ask(order(me, FIRST))
    standing.until(FIRST)
    ready = standing.groups.take(FIRST)
    assert ready is not None
    ready.adopt(2, lambda: None)
    me.say("formed")
    me.hear()
    if me.rank == 1:
        ready.leave()
        me.settle()
        return "left"
    with suppress(GenerationLost):
        summed(ready)
        return "nobody noticed"
    return "lost"


def test_a_group_whose_member_is_gone_is_lost_and_not_waited_for() -> None:
    with ranks(lost_its_peer, 2) as both:
        assert [one.said() for one in both] == ["formed"] * 2
        both[1].tell("leave")
        assert both[1].result() == "left"
        both[0].tell("sum")
        assert both[0].result() == "lost"


def gave_up(me: Self) -> list[str]:
    """Its peer never comes. Returns the keys that this process had left in the store meanwhile."""
    standing, client = Standing(me), client_of(me)
    standing.groups.ask(order(me, FIRST))
    until(lambda: client.num_keys() > 0)
    left = client.list_keys()
    standing.groups.close()
    until(lambda: client.num_keys() == 0)
    return left


def test_who_gives_up_a_group_is_not_there_any_more() -> None:
    assert results(gave_up, 1) == [[f"generation-1-standby-{FIRST}/here-0"]]


def client_of(me: Self) -> dist.TCPStore:
    limit = timedelta(seconds=LIMIT_S)
    return connect((LOOPBACK, me.port), limit, lambda: None, lambda: False)


def formed_as_asked(me: Self) -> set[str]:
    """Forms the four groups that the test asks for. Returns whose keys the store has then."""
    standing, names = Standing(me), list[str]()
    for _ in range(4):
        asked = me.hear()
        standing.groups.ask(structs.replace(asked, store_port=me.port))
        names.append(asked.group)
    standing.until(*names)
    me.settle()
    me.say("formed")
    me.hear()
    found = {key.split("/")[0] for key in client_of(me).list_keys()}
    standing.groups.close()
    me.settle()
    return found


def test_a_group_deletes_the_keys_of_those_whose_place_it_takes() -> None:
    """Else they would grow in number with each spare that comes, until the generation ends."""
    with ranks(formed_as_asked, 2) as both:
        told = {f"w{rank}": one for rank, one in enumerate(both)}
        newest: dict[int, str] = {}

        def send(process: str, asked: Message) -> None:
            assert isinstance(asked, StandBy)
            newest[asked.lost] = asked.group
            told[process].tell(asked)

        book = StandbyBook(send, lambda *_, **__: None)
        book.ask(1, {0: ("w0", "w1"), 1: ("w0", "w1")}, 0)
        for members in (("w1", "w0"), ("w0", "w1")):
            book.ask(1, {0: members}, 0)
        assert [one.said() for one in both] == ["formed"] * 2
        for one in both:
            one.tell("go on")
        wanted = {f"generation-1-standby-{name}" for name in newest.values()}
        assert [one.result() for one in both] == [wanted] * 2
