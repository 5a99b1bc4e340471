"""What is done to nodes and to the network between them, in containers of a real engine, as seen
from inside.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import pytest

from tests.harness.launch.containers.test_docker_real import Nodes, nodes_of
from tests.support.clusters.docker_engine import REQUIRED, engine
from tests.support.running import until
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.containers.inside import (
    ByEngine,
    ByNamespace,
    lacks_tools,
    may_enter,
)
from trainchaos.harness.launch.containers.links import NodeLinks

__all__ = ["engine"]
pytestmark = [
    pytest.mark.real,
    pytest.mark.docker,
    pytest.mark.skipif(
        not REQUIRED and not may_enter(),
        reason=f"packets cannot be handled here: {lacks_tools() or 'not root'}",
    ),
]

OPEN = LinkShape()
AHEAD, BACK = ("0", "1"), ("1", "0")
WITHIN = 0.15
BURN = (
    "import time\nbegun, end = time.process_time(), time.monotonic() + 1\n"
    "while time.monotonic() < end: pass\nprint(time.process_time() - begun)"
)
LISTEN = """
import socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 7000))
sock.settimeout(120)
print("listening", flush=True)
while True:
    print(repr(sock.recv(100)), time.monotonic_ns(), flush=True)
"""


@pytest.fixture(scope="module")
def nodes(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Two that have dialled in."""
    with nodes_of(tmp_path_factory.mktemp("faults") / "run") as made:
        for node in range(2):
            made.start(node)
        yield made


@pytest.fixture
def links(nodes: Nodes) -> Iterator[NodeLinks]:
    """Healed afterwards, twice."""
    found = nodes.platform.links
    assert isinstance(found, NodeLinks)
    yield found
    for _ in range(2):
        found.shape([AHEAD, BACK], OPEN)


class Datagrams:
    """From one node to the other."""

    def __init__(self, nodes: Nodes, source: int, sink: int) -> None:
        platform = nodes.platform
        self._address = platform.address(sink)
        self._from = ByNamespace(platform.init_pid(source))
        self._at = ByNamespace(platform.init_pid(sink))
        self._helper = self._at.stay([sys.executable, "-c", LISTEN, self._address])
        assert self._helper.stdout is not None
        assert self._helper.stdout.readline() == b"listening\n"

    def send(self, text: str) -> None:
        code = (
            "import socket, sys\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)"
            ".sendto(sys.argv[1].encode(), (sys.argv[2], 7000))"
        )
        self._from.run([sys.executable, "-c", code, text, self._address])

    def next(self) -> str:
        """What arrives next."""
        assert self._helper.stdout is not None
        return self._helper.stdout.readline().split()[0].decode().strip("b'")

    def close(self) -> None:
        self._helper.kill()
        self._helper.wait(120)
        assert self._helper.stdin is not None and self._helper.stdout is not None
        self._helper.stdin.close()
        self._helper.stdout.close()
        self._from.close()
        self._at.close()


@pytest.fixture
def ahead(nodes: Nodes) -> Iterator[Datagrams]:
    made = Datagrams(nodes, 0, 1)
    yield made
    made.close()


def measured(links: NodeLinks, link: tuple[str, str] = AHEAD) -> Mapping[str, Any]:
    """What a probe says."""
    number = links.probe(link)
    found: Mapping[str, Any] = until(lambda: links.probed(number))
    return found


def burned(nodes: Nodes, node: int) -> float:
    """Processor time that a node gets in a second."""
    said = nodes.platform.container(node).exec_run([sys.executable, "-c", BURN])
    return float(said.output)


@pytest.mark.parametrize(
    "mbit", [10, *(pytest.param(mbit, marks=pytest.mark.long) for mbit in (100, 1000))]
)
def test_a_throttled_link_passes_what_was_asked_for(links: NodeLinks, mbit: int) -> None:
    assert links.shape([AHEAD], LinkShape(bytes_per_s=mbit * 1e6 / 8)) == "htb"
    found = median(measured(links)["mbit_per_s"] for _ in range(3 if mbit < 1000 else 5))
    assert abs(found - mbit) <= WITHIN * mbit
    if mbit == 10:
        links.shape([AHEAD], OPEN)
        assert measured(links)["mbit_per_s"] > 10 * mbit


def test_a_link_that_is_blocked_one_way_is_open_the_other(
    nodes: Nodes, links: NodeLinks, ahead: Datagrams
) -> None:
    back = Datagrams(nodes, 1, 0)
    try:
        assert links.shape([AHEAD], LinkShape(blocked=True)) == "nft drop"
        ahead.send("lost")
        back.send("passes")
        assert back.next() == "passes"
        links.shape([AHEAD], OPEN)
        ahead.send("later")
        assert ahead.next() == "later", "the first is lost, not late"
    finally:
        back.close()


def test_a_link_that_flaps_is_down_and_comes_back_by_itself(
    links: NodeLinks, ahead: Datagrams
) -> None:
    assert links.shape([AHEAD, BACK], LinkShape(down_s=0.8, up_s=30.0)) == "nft drop in turn"
    ahead.send("down")
    pause = Event()
    for number in range(100):
        ahead.send(f"try{number}")
        if not links._flaps.down():
            break
        pause.wait(0.05)
    ahead.send("up")
    arrived = [ahead.next()]
    while arrived[-1] != "up":
        arrived.append(ahead.next())
    assert "down" not in arrived


@pytest.mark.long
def test_a_late_link_is_late_one_way_and_a_lossy_one_loses(links: NodeLinks) -> None:
    usual = measured(links)["round_trip_s"]
    by = links.shape([AHEAD], LinkShape(delay_s=0.05))
    late = measured(links)["round_trip_s"]
    assert by and late > 0.049 > usual
    links.shape([AHEAD], LinkShape(loss=0.5))
    links.shape([AHEAD], OPEN)
    until(lambda: measured(links)["round_trip_s"] < late)


def test_an_isolated_node_meets_nobody_until_it_rejoins(nodes: Nodes, links: NodeLinks) -> None:
    machines = nodes.platform.machines
    assert machines is not None
    machines.isolate(1)
    assert measured(links) == measured(links, BACK) == {"round_trip_s": None, "mbit_per_s": None}
    nodes.links[1].setblocking(False)
    for _ in range(2):
        machines.rejoin(1)
    assert measured(links)["round_trip_s"] is not None
    with pytest.raises(BlockingIOError):
        nodes.links[1].recv(1)  # the connection to it has lived through it


def test_a_paused_node_stands_still_until_it_is_resumed(nodes: Nodes, ahead: Datagrams) -> None:
    machines = nodes.platform.machines
    assert machines is not None
    for _ in range(2):
        machines.pause(1)
    assert machines.seen(1)["state"] == "paused"
    assert Path(f"/proc/{nodes.platform.init_pid(1)}/stat").read_text().split()[2] in "DS"
    for _ in range(2):
        machines.resume(1)
    assert machines.seen(1)["state"] == "running"


def test_a_quota_holds_and_the_kernel_counts_the_waiting(nodes: Nodes) -> None:
    machines = nodes.platform.machines
    assert machines is not None
    before = machines.seen(0)["throttled"]
    machines.limit_cores(0, 0.05)  # less than it gets beside whatever else runs on this machine
    assert burned(nodes, 0) <= 0.1
    assert machines.seen(0)["throttled"] > before
    for _ in range(2):
        machines.limit_cores(0, None)
    assert nodes.platform.container(0).attrs["HostConfig"]["CpuQuota"] != 5_000


def test_who_takes_more_memory_than_a_node_has_is_killed_and_nobody_else(nodes: Nodes) -> None:
    machines, container = nodes.platform.machines, nodes.platform.container(0)
    assert machines is not None
    hog = [sys.executable, "-c", "bytearray(120 << 20)"]
    machines.limit_memory(0, 40)
    assert container.exec_run(hog).exit_code == 137
    seen = machines.seen(0)
    assert seen["oom_kills"] == 1 and seen["state"] == "running"
    for _ in range(2):
        machines.limit_memory(0, None)
    assert container.exec_run(hog).exit_code == 0


@pytest.mark.long
def test_a_killed_node_is_the_engines_word_and_anew_it_is_another_machine(
    engine: Any, tmp_path: Path
) -> None:
    with nodes_of(tmp_path / "run") as nodes:
        machines, links = nodes.platform.machines, nodes.platform.links
        assert machines is not None and links is not None
        for node in range(2):
            nodes.start(node)
        links.shape([BACK], LinkShape(blocked=True))
        before = machines.seen(0)["machine"]
        machines.kill(0)
        until(lambda: nodes.platform.gone(0))
        assert (
            until(lambda: machines.seen(0)["state"] == "exited")
            and machines.seen(0)["exit_code"] == 137
        )
        machines.resume(0)
        machines.limit_cores(0, None)
        nodes.start(0)
        assert machines.seen(0)["machine"] != before
        assert measured(links, BACK)["mbit_per_s"] is None, "its link is still blocked"  # type: ignore[arg-type]


@pytest.mark.long
def test_without_root_the_engine_runs_the_tools_in_the_node(engine: Any, tmp_path: Path) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        nodes_of(tmp_path / "run", needs=frozenset({Need.LINKS}), outside=False) as nodes,
    ):
        patch.setattr("trainchaos.harness.launch.containers.platform.may_enter", lambda: False)
        for node in range(2):
            nodes.start(node)
        assert nodes.platform.container(0).attrs["HostConfig"]["CapAdd"] == ["NET_ADMIN"]
        links = nodes.platform.links
        assert isinstance(links, NodeLinks)
        assert links.shape([AHEAD], LinkShape(bytes_per_s=1.25e6)) == "htb"
        assert abs(measured(links)["mbit_per_s"] - 10) <= WITHIN * 10
        with pytest.raises(RuntimeError, match="nft refused"):
            ByEngine(nodes.platform.container(0), sys.executable).run(
                ["nft", "-f", "-"], "nonsense\n"
            )


def test_a_tool_that_refuses_says_why(nodes: Nodes) -> None:
    inside = ByNamespace(nodes.platform.init_pid(0))
    with pytest.raises(RuntimeError, match="tc refused"):
        inside.run(["tc", "qdisc", "add", "dev", "eth0", "root", "nonsense"])
    with pytest.raises(RuntimeError, match="did not run"):
        inside.run(["sleep", "20"], limit_s=0.1)
    inside.close()


def test_packets_pass_once_the_helper_that_holds_them_has_ended_with_its_harness(
    links: NodeLinks,
) -> None:
    if links.has_netem():
        pytest.skip("this kernel delays packets by itself")
    links.shape([AHEAD], LinkShape(delay_s=0.3))
    (helper,) = links._in_force[1].delayers.values()
    assert helper.process.stdin is not None
    helper.process.stdin.close()  # as when the harness is killed
    assert helper.process.wait(120) == 0
    until(lambda: measured(links)["round_trip_s"] < 0.3)
