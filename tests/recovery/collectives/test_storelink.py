"""The connection to the key-value store that a rank keeps over generations, and the store that
needs no name server.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.open_files import open_files
from tests.support.ranks import Self, ranks, results
from tests.support.running import LIMIT_S
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.collectives.storelink import StoreLink, forget_former, socket_to
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.transport.reverse_dns import nameless


def client_of(port: int) -> dist.TCPStore:
    limit = timedelta(seconds=LIMIT_S)
    return nameless(lambda: dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))


def test_a_kept_connection_is_used_again_once() -> None:
    store, port = start_store()
    link = StoreLink()
    assert link.take((LOOPBACK, port)) is None
    client = client_of(port)
    link.keep((LOOPBACK, port), client, socket_to((LOOPBACK, port)))
    assert link.inode.startswith("socket:[")
    assert link.take((LOOPBACK, port)) is client
    assert link.take((LOOPBACK, port)) is None, (
        "one that is in use, perhaps for ever, is not given to anybody else"
    )
    del store


def test_a_connection_to_another_store_or_to_none_is_not_used() -> None:
    store, port = start_store()
    link = StoreLink()
    link.keep((LOOPBACK, port), client_of(port), socket_to((LOOPBACK, port)))
    assert link.take((LOOPBACK, port + 1)) is None
    link.keep((LOOPBACK, port), client_of(port), socket_to((LOOPBACK, port)))
    assert link.take(("127.0.0.2", port)) is None
    client = client_of(port)
    link.keep((LOOPBACK, port), client, socket_to((LOOPBACK, port)))
    with socket.socket(fileno=fd_of(link.inode)) as sock:
        sock.shutdown(socket.SHUT_RDWR)  # as when the store is lost
    assert link.take((LOOPBACK, port)) is None
    del store


def fd_of(inode: str) -> int:
    found = [fd for fd in os.listdir("/proc/self/fd") if _points_to(fd, inode)]
    return os.dup(int(found[0]))


def _points_to(fd: str, inode: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == inode
    except OSError:
        return False


def test_the_store_listens_on_ipv4_loopback_alone() -> None:
    """Clients of a socket for all addresses are strangers, whom torch looks up by the name server
    one by one.
    """
    store, port = start_store()
    wanted = f"{port:04X}"
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    places = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    assert f"0100007F:{wanted}" in places
    lines = Path("/proc/self/net/tcp6").read_text().splitlines()[1:]
    assert not [
        line for line in lines if line.split()[1].endswith(f":{wanted}") and line.split()[3] == "0A"
    ]
    del store


def meet_again_and_again(me: Self) -> tuple[list[str], list[int]]:
    """The socket to the store in each generation, and how many descriptors there are after it."""
    link, inodes, counts = StoreLink(), [], []
    for generation in range(1, 13):
        group = me.group(generation, link=link)
        group.form()
        ones = torch.ones(3)
        group.wait(group.start_all_reduce(ones))
        assert ones.tolist() == [2.0] * 3
        inodes.append(link.inode)
        me.leave()
        me.settle()
        counts.append(open_files())
    return inodes, counts


@pytest.mark.real
def test_all_generations_meet_over_one_connection() -> None:
    for inodes, counts in results(meet_again_and_again, 2):
        assert len(set(inodes)) == 1 and inodes[0]
        assert max(counts[-3:]) <= counts[2] + 2, f"descriptors leak: {counts}"


def meet_after_an_abort(me: Self) -> bool:
    """A connection that was in use when a group was broken as it formed is not used again."""
    link = StoreLink()
    first = me.group(1, link=link)
    first.form()
    first.wait(first.start_all_reduce(torch.ones(3)))
    before = link.inode
    me.leave()
    broken = me.group(2, link=link, world=3)  # the third never comes
    me.say("forming")
    with pytest.raises(GenerationLost):
        broken.form()
    me.leave()
    # by the thread that aborts, so that it is done with the broken group
    assert me.hear() == "go on"
    me.entered()
    third = me.group(3, link=link)
    third.form()
    third.wait(third.start_all_reduce(torch.ones(3)))
    return link.inode not in ("", before)


@pytest.mark.real
def test_a_group_that_was_aborted_while_it_formed_costs_the_connection() -> None:
    with ranks(meet_after_an_abort, 2) as members:
        for member in members:
            assert member.said() == "forming"
        for member in members:
            member.tell(("abort", 2))
            member.tell("go on")
        assert [member.result() for member in members] == [True, True]


def test_what_earlier_generations_met_by_is_deleted_and_nothing_else() -> None:
    store, port = start_store()
    client = client_of(port)
    for key in (
        "generation-1/0/0",
        "generation-9/shard-0/0/1",
        "generation-10/0/0",
        "generation-11/0/0",
        "else",
    ):
        client.set(key, "x")
    assert forget_former(client, "generation-10") == 2
    assert sorted(store.list_keys()) == ["else", "generation-10/0/0", "generation-11/0/0"]
    del store
    assert forget_former(client, "generation-11") == 0, "a store that is gone is no error"


def test_a_group_that_stands_by_deletes_what_those_before_it_met_by() -> None:
    store, port = start_store()
    client = client_of(port)
    past = ("generation-8-standby-ab-1-9/0/0", "generation-9-standby-ab-1-2/here-0")
    left = (
        "generation-9-standby-ab-0-1/0/0",  # for the loss of another rank
        "generation-9-standby-ab-1-10/0/0",
        "generation-9-standby-ab-1-11/0/0",
        "generation-9-standby-cd-1-1/0/0",  # another supervisor asked for it
        "generation-9/0/0",
        "generation-10-standby-ab-1-3/0/0",
    )
    for key in (*past, *left):
        client.set(key, "x")
    assert forget_former(client, "generation-9-standby-ab-1-10") == len(past)
    assert sorted(store.list_keys()) == sorted(left)
    del store


def three_generations(me: Self) -> list[str]:
    """The keys that are left once the third has formed."""
    link = StoreLink()
    for generation in (1, 2, 3):
        group = me.group(generation, link=link)
        group.form()
        me.say("formed")
        me.hear()
        me.settle()
        me.leave()
    client = link.take((LOOPBACK, me.port))
    assert client is not None
    return client.list_keys()


@pytest.mark.real
def test_the_store_holds_the_keys_of_one_generation_alone() -> None:
    with ranks(three_generations, 2) as started:
        for _ in range(3):
            for rank in started:
                rank.said()
            for rank in started:
                rank.tell("go on")
        keys = started[0].result()
        assert keys and {key.split("/")[0] for key in keys} == {"generation-3"}
