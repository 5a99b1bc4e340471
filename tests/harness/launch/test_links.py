"""The link proxy with real connections, what shapes them, and how ranks are led to it."""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.running import LIMIT_S, readable, until
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.links.client import LinkProxy
from trainchaos.harness.launch.links.route import Router
from trainchaos.harness.launch.links.shaping import RTO_S, Pacer
from trainchaos.harness.sim.world.clock import Clock
from trainchaos.harness.sim.world.links import SimLinks
from trainchaos.recovery.collectives.dialing import (
    RankNames,
    RedirectingStore,
    address_of,
    published,
    redirected,
)
from trainchaos.recovery.collectives.group import gloo_device

LINK = ("a", "b")
PROBES = 4


@pytest.fixture
def proxy() -> Iterator[LinkProxy]:
    made = LinkProxy()
    try:
        yield made
    finally:
        made.close()


def measured(proxy: LinkProxy, link: tuple[str, str] = LINK) -> Mapping[str, Any]:
    """What a probe says."""
    number = proxy.probe(link)
    found: list[Mapping[str, Any] | None] = []

    def probed() -> bool:
        found.append(proxy.probed(number))
        return found[-1] is not None

    until(probed)
    return found[-1] or {}


def round_trip_s(proxy: LinkProxy, link: tuple[str, str] = LINK) -> float:
    """The best of some probes, as others use this machine too."""
    return min(measured(proxy, link)["round_trip_s"] or math.inf for _ in range(PROBES))


def mbit_per_s(proxy: LinkProxy) -> float:
    """One probe."""
    return float(measured(proxy)["mbit_per_s"] or 0.0)


def connected(
    proxy: LinkProxy, link: tuple[str, str] = LINK
) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection from ``link[0]`` to ``link[1]``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        way = Router(link[0], proxy.door)(link[1], server.getsockname()[:2])
        near = socket.create_connection(way, timeout=LIMIT_S)
        far, _ = server.accept()
    far.settimeout(LIMIT_S)
    return near, far


# ---- pure


def test_a_bucket_lets_pass_what_it_is_told_to() -> None:
    pacer = Pacer(LinkShape(bytes_per_s=1e6), 0.0)
    due = [pacer.release_s(10.0, 5000) for _ in range(200)]
    assert due == sorted(due)
    assert due[-1] == pytest.approx(11.0, abs=0.02)
    assert pacer.chunk < 10_000 and pacer.held < 50_000, "what is read waits only for a moment"


def test_delay_keeps_the_order_and_loss_costs_a_timeout() -> None:
    pacer = Pacer(LinkShape(delay_s=0.05, jitter_s=0.04), 0.0, seed=3)
    due = [pacer.release_s(10 + n / 1000, 100) for n in range(100)]
    assert due == sorted(due)
    assert all(0.009 < when - 10 - n / 1000 < 0.2 for n, when in enumerate(due))
    lossy = Pacer(LinkShape(loss=0.5), 0.0, seed=3)
    late = [lossy.release_s(100.0 * n, 100) - 100.0 * n for n in range(200)]
    assert set(map(lambda s: round(s, 6), late)) == {0.0, RTO_S}
    assert 60 < sum(s > 0 for s in late) < 140
    assert Pacer(LinkShape(loss=0.5), 0.0, seed=3).release_s(0.0, 100) == late[0], (
        "the seed decides"
    )


def test_a_link_that_flaps_begins_down() -> None:
    pacer = Pacer(LinkShape(down_s=1.0, up_s=2.0), since_s=5.0)
    opens = [pacer.opens_s(5.0 + t) - 5.0 for t in (0.0, 0.5, 1.5, 2.9, 3.25)]
    assert opens == pytest.approx([1.0, 1.0, 1.5, 2.9, 4.0])
    assert Pacer(LinkShape(blocked=True), 0.0).opens_s(1.0) == math.inf


def blob_of(host: str, at: tuple[str, int]) -> bytes:
    """As gloo publishes a rank."""
    address = struct.pack("=H", socket.AF_INET) + struct.pack(">H", at[1]) + socket.inet_aton(at[0])
    sized = struct.pack("=Q", len(host)) + host.encode() + struct.pack("=Q", 136)
    return sized + address.ljust(136, b"\0") + b"pairs"


def test_an_address_is_changed_in_what_gloo_publishes_and_nothing_else() -> None:
    for host in ("vm", "a-node-with-a-longer-name"):
        blob = blob_of(host, ("10.0.0.3", 4711))
        assert published(blob) == ("10.0.0.3", 4711)
        assert redirected(blob, ("127.0.0.1", 99)) == blob_of(host, ("127.0.0.1", 99))
        for strange in (b"", blob[:10], blob[:100], bytes(200), b"\xff" * 200):
            with pytest.raises(RuntimeError, match="cannot find an IPv4 address"):
                published(strange)


def test_who_connects_leads_the_way_and_only_over_lower_addresses() -> None:
    inner = dist.HashStore()
    blobs = [blob_of("vm", at) for at in (("10.0.0.1", 256), ("10.0.0.2", 1), ("10.0.0.2", 256))]
    for rank, blob in enumerate(blobs):
        inner.set(f"0/{rank}", blob)
    asked: list[int] = []

    def dial(peer: int, at: tuple[str, int]) -> tuple[str, int]:
        asked.append(peer)
        return ways.pop(0)

    ways = [("10.0.0.0", 7), ("10.0.0.9", 7)]
    store = RedirectingStore(inner, 1, dial)
    store.set("0/1", blobs[1])
    assert store.get("0/0") == blob_of("vm", ("10.0.0.0", 7))
    assert asked == [0]
    # 1 read as this machine's bytes is 256 and the other way round: port 1 is the larger one
    with pytest.raises(RuntimeError, match=r"10\.0\.0\.2 to 10\.0\.0\.9, which is not below"):
        store.get("0/2")
    other = RedirectingStore(inner, 2, dial)
    other.set("0/2", blobs[2])
    assert other.get("0/1") == blobs[1], "it waits to be connected to"
    assert asked == [0, 2]


def test_ranks_listen_at_addresses_that_grow_with_them_above_the_proxys() -> None:
    packed = [socket.inet_aton(address_of(rank)) for rank in (0, 1, 255, 256, 65535)]
    assert packed == sorted(packed) and len(set(packed)) == 5
    assert socket.inet_aton("127.0.0.1") < packed[0]
    for rank in (-1, 65536):
        with pytest.raises(ValueError, match="no address"):
            address_of(rank)


def test_ranks_find_the_names_of_their_peers_in_the_store() -> None:
    store = dist.HashStore()
    rolls = [RankNames(store, rank, name) for rank, name in enumerate("wxyz")]
    dial = rolls[0].by_rank(lambda name, at: (name, at[1]), range(1, 4, 2))
    assert [dial(place, ("h", 5)) for place in (0, 1)] == [("x", 5), ("z", 5)]


def test_a_simulated_link_hurts_neighbours_of_the_ring_only() -> None:
    links = SimLinks(Clock(), "seed")
    ring = ("a", "b", "c", "d")
    links.shape([("a", "c")], LinkShape(blocked=True))
    assert not links.blocked(ring) and links.blocked(("a", "c", "d"))
    links.shape([("b", "a")], LinkShape(delay_s=0.01))
    assert links.extra_ns(ring, 1000) == pytest.approx(6 * 0.01 * 1e9)
    links.shape([("a", "c"), ("b", "a")], LinkShape())
    assert links.extra_ns(ring, 1000) == 0 and not links.blocked(("a", "c", "d"))


# ---- the proxy


@pytest.mark.slow
def test_bytes_come_through_unchanged_both_ways_and_so_does_the_end(proxy: LinkProxy) -> None:
    near, far = connected(proxy)
    sent = os.urandom(3 << 20)
    for source, sink in ((near, far), (far, near)):
        writer = threading.Thread(target=source.sendall, args=(sent,))
        writer.start()
        got = bytearray()
        while len(got) < len(sent):
            got += sink.recv(1 << 20)
        writer.join(LIMIT_S)
        assert got == sent
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b"", "one side has ended"
    far.sendall(b"still")
    assert near.recv(5) == b"still"
    far.close()
    assert near.recv(1) == b""
    near.close()


@pytest.mark.slow
def test_it_measures_what_was_asked_for(proxy: LinkProxy) -> None:
    proxy.shape([LINK], LinkShape(delay_s=0.05))
    late_s = round_trip_s(proxy)
    assert late_s >= 0.05
    until(lambda: round_trip_s(proxy) < 0.05 * 3)
    assert measured(proxy, ("b", "a"))["round_trip_s"] >= 0.05, (
        "an answer comes back over the slow link"
    )
    assert round_trip_s(proxy, ("a", "c")) < late_s, "no other link is touched"
    proxy.shape([LINK], LinkShape(bytes_per_s=2.5e6))
    until(lambda: mbit_per_s(proxy) == pytest.approx(20, rel=0.3))
    proxy.shape([LINK], LinkShape(blocked=True))
    assert measured(proxy) == {"round_trip_s": None, "mbit_per_s": None}
    proxy.shape([LINK], LinkShape())
    assert round_trip_s(proxy) < late_s


def test_what_waits_in_a_blocked_link_goes_on_when_it_is_healed(proxy: LinkProxy) -> None:
    near, far = connected(proxy)
    proxy.shape([LINK], LinkShape(blocked=True))
    near.sendall(b"waits")
    far.sendall(b"passes")
    assert near.recv(6) == b"passes", "the other way is open"
    assert not readable(far, 0.2)
    proxy.shape([LINK], LinkShape())
    assert far.recv(5) == b"waits"
    near.close()
    far.close()


def test_a_connection_over_a_blocked_link_is_made_when_it_is_healed(proxy: LinkProxy) -> None:
    proxy.shape([("b", "a")], LinkShape(blocked=True))
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(
            Router("a", proxy.door)("b", server.getsockname()[:2]), timeout=LIMIT_S
        )
        assert not readable(server, 0.2), "its answer would not come back"
        proxy.shape([("b", "a")], LinkShape())
        server.settimeout(LIMIT_S)
        server.accept()[0].close()
    near.close()


def test_a_peer_that_does_not_listen_is_a_closed_connection(proxy: LinkProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = server.getsockname()[:2]
    near = socket.create_connection(Router("a", proxy.door)("b", at), timeout=LIMIT_S)
    assert near.recv(1) == b""
    near.close()


def test_nonsense_at_its_door_does_not_end_it(proxy: LinkProxy) -> None:
    with socket.create_connection(proxy.door, timeout=LIMIT_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert sock.recv(10) == b""
    assert measured(proxy)["round_trip_s"] is not None


def test_it_ends_with_whoever_started_it() -> None:
    code = (
        "import sys, threading; from trainchaos.harness.launch.links.client import LinkProxy;"
        "p = LinkProxy();"
        "print(p.process.pid, flush=True); threading.Event().wait(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pidfd = os.pidfd_open(int(starter.stdout.readline()))
    starter.send_signal(signal.SIGKILL)
    starter.wait(timeout=LIMIT_S)
    assert readable(pidfd), "the proxy outlived its starter"
    os.close(pidfd)
    starter.stdout.close()


def meet(store: dist.Store, rank: int, world: int, dial: Any) -> float:
    """Be a rank of a gloo group at an address that all its ranks share; the sum of what
    they bring.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=LIMIT_S)
    options._devices = [gloo_device("127.0.0.5")]
    group = dist.ProcessGroupGloo(RedirectingStore(store, rank, dial), rank, world, options)
    brought = torch.tensor([float(rank)])
    group.allreduce([brought]).wait()
    return float(brought[0])


def test_of_two_ranks_of_a_node_exactly_one_leads_its_way_through_the_proxy(
    proxy: LinkProxy,
) -> None:
    """Their ports decide, as gloo compares them; seen otherwise here, a pair would go straight, or
    never meet.
    """
    world, store = 5, dist.HashStore()
    led: list[frozenset[int]] = []
    one = threading.Lock()

    def dial_of(rank: int) -> Any:
        def dial(peer: int, at: tuple[str, int]) -> tuple[str, int]:
            with one:
                led.append(frozenset({rank, peer}))
                return "127.0.0.1", proxy.forward((str(rank), str(peer)), *at)

        return dial

    with ThreadPoolExecutor(world) as pool:
        made = [pool.submit(meet, store, rank, world, dial_of(rank)) for rank in range(world)]
        assert [rank.result(timeout=LIMIT_S) for rank in made] == [10.0] * world
    assert sorted(map(sorted, led)) == sorted(
        [a, b] for a in range(world) for b in range(a + 1, world)
    )
