"""Connections that ask no name server, whatever the network is like."""

from __future__ import annotations

import socket
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.running import LIMIT_S
from trainchaos.recovery.collectives import sockets
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.policy.jobconfig import LOOPBACK, NetworkAddresses
from trainchaos.recovery.process.local import ask_store, start_store
from trainchaos.recovery.transport import reverse_dns as module
from trainchaos.recovery.transport.reverse_dns import nameless

UNNAMED = "::ffff:192.0.2.7"  # an address for documents, which no hosts file has
HOST = "127.0.0.9"  # a loopback address that no hosts file names, as some do the first

Asked = list[bytes]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The queries that were answered here."""
    queries: Asked = []
    answer = module._answer

    def noted(query: bytes) -> bytes:
        queries.append(query)
        return answer(query)

    monkeypatch.setattr(module, "_answer", noted)
    return queries


def test_an_address_has_no_name_there(asked: Asked) -> None:
    assert nameless(lambda: socket.getnameinfo((UNNAMED, 80), socket.NI_NUMERICSERV)) == (
        UNNAMED,
        "80",
    )
    assert [b"\x017\x012\x010\x03192\x07in-addr" in query for query in asked] == [True]


def test_what_the_hosts_file_says_holds() -> None:
    names = nameless(lambda: socket.getnameinfo((LOOPBACK, 80), socket.NI_NUMERICSERV))
    assert names == socket.getnameinfo((LOOPBACK, 80), socket.NI_NUMERICSERV)


class Thing:
    """Something that is made."""


def test_what_was_made_is_the_callers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the thread that made it has not ended: a store that is let go of ends at once."""
    looked = threading.Event()

    class Lingering(socket.socket):
        def sendto(self, *what: Any) -> int:
            sent = super().sendto(*what)
            looked.wait(LIMIT_S)
            return sent

    monkeypatch.setattr(module.socket, "socket", Lingering)
    made = nameless(Thing)
    held = weakref.ref(made)
    del made
    try:
        assert held() is None
    finally:
        looked.set()


def test_torch_asks_nobody_else_whom_it_connects_to(asked: Asked) -> None:
    _store, port = start_store(HOST)
    by_the_server = len(asked)
    assert ask_store(port, timeout_s=LIMIT_S, host=HOST) is not None
    assert 0 < by_the_server < len(asked)


def test_a_group_forms_without_asking(asked: Asked) -> None:
    _store, port = start_store(HOST)
    asked.clear()
    group = Group(
        generation=1,
        rank=0,
        world=1,
        store_port=port,
        backend="gloo",
        timeout_s=LIMIT_S,
        check=lambda: None,
        net=NetworkAddresses(store_host=HOST),
    )
    group.form()
    assert asked
    group.leave()


def test_a_client_of_the_store_is_as_any_other() -> None:
    store, port = start_store()
    limit = timedelta(seconds=LIMIT_S)
    client = nameless(lambda: dist.TCPStore(LOOPBACK, port, is_master=False, timeout=limit))
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_what_fails_there_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        nameless(lambda: 1 // 0)
    assert nameless(lambda: None) is None


def test_it_ends_when_no_socket_can_be_made_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("too many open files")

    assert nameless(lambda: monkeypatch.setattr(module.socket, "socket", refuse) or 5) == 5  # type: ignore[func-returns-value]


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: object())
    assert nameless(lambda: 5) == 5


@pytest.mark.slow
def test_an_abort_in_the_middle_of_it_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign, answer = sockets.socket_inodes(), module._answer

    def shut_down(query: bytes) -> bytes:
        sockets.shut_down(lambda inode: inode not in foreign)
        return answer(query)

    monkeypatch.setattr(module, "_answer", shut_down)
    with pytest.raises(socket.gaierror):
        nameless(lambda: socket.getnameinfo((UNNAMED, 80), 0))
