"""Processes of an arm that are placed while nodes are lost, and keepers of nodes that come
and go.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.harness.arm.roster import PATIENCE_S, ArmRoster
from trainchaos.harness.launch.devices import DeviceBoard
from trainchaos.harness.launch.launcher import Leftovers
from trainchaos.harness.launch.places.seats import UNTAINTED
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.checkpoint.memory.keeper import TOPIC, KeeperConfig
from trainchaos.recovery.checkpoint.memory.keepers import Keepers, KeeperStarted
from trainchaos.recovery.health.reputation import Reputation
from trainchaos.recovery.process.host import Exited, MessageReceived, Report
from trainchaos.recovery.supervise.supervisor import StartedProcess
from trainchaos.recovery.transport.wire import Extra, Message

SECOND = 1_000_000_000


class FakeNodes:
    """A cluster of two nodes, some of which refuse to start anything."""

    tainted = UNTAINTED

    def __init__(self) -> None:
        self.there: Collection[int] = (0, 1)
        self.refuses: set[int] = set()
        self.asked = self.answers_after = 0
        self.started: list[tuple[str, int, str]] = []

        self._clock = itertools.count()

    def now_ns(self) -> int:
        return next(self._clock) * SECOND

    def usable(self) -> Collection[int]:
        return self.there

    def places_on(self, node: int) -> Sequence[str]:
        return [f"cpu:0@n{node}"]

    def spawn(self, name: str, role: str, mode: str, device: str, node: int) -> int:
        self.asked += 1
        if node in self.refuses or self.asked <= self.answers_after:
            raise ConnectionError(f"node {node}: the power failed")
        self.started.append((name, node, device))
        return 100 + len(self.started)

    def undo(self, name: str, pid: int) -> None:
        return None


@pytest.fixture
def nodes() -> FakeNodes:
    return FakeNodes()


@pytest.fixture
def asked_ns() -> dict[str, int]:
    return {}


@pytest.fixture
def roster(nodes: FakeNodes, asked_ns: dict[str, int]) -> ArmRoster:
    scenario = SimpleNamespace(topology=Topology(ranks=2, nodes=2))
    setup: Any = SimpleNamespace(id="arm", cell=SimpleNamespace(scenario=scenario))
    cluster: Any = nodes
    return ArmRoster(setup, cluster, Ledger(Path("unused")), asked_ns, spares=0)


def test_a_process_whose_node_is_lost_as_it_starts_begins_on_another(
    roster: ArmRoster, nodes: FakeNodes
) -> None:
    nodes.refuses = {0}
    started = StartedProcess(name="w1", pid=101, node=1, device="cpu:0@n1")
    assert roster.start("worker", "warm") == started, "a w0 may begin late"
    assert nodes.started == [("w1", 1, "cpu:0@n1")]
    assert roster.node_of("w1") == 1 and roster.on_node(1) == ["w1"] and roster.on_node(0) == []
    assert roster.start("worker", "warm").name == "w2"
    assert nodes.started[-1] == ("w2", 1, "cpu:0@n1"), "the place of the second rank"


def test_a_place_that_is_about_to_fail_is_used_only_where_there_is_no_other(
    roster: ArmRoster, nodes: FakeNodes
) -> None:
    roster.start("worker", "warm")
    roster.start("worker", "warm")
    roster.reputation.announce((0, None))
    roster.exited(Exited(process="w0", exit_code=None, signal=9, time_ns=0))
    roster.start("worker", "warm")
    assert nodes.started[-1] == ("w2", 1, "cpu:0@n1"), "though node 0 lacks a process"
    nodes.there = (0,)
    roster.start("worker", "warm")
    assert nodes.started[-1][1] == 0


@pytest.fixture
def reputation() -> Reputation:
    return Reputation(lambda: 0.0)


def test_a_device_that_is_about_to_fail_is_used_only_where_a_node_has_no_other(
    reputation: Reputation,
) -> None:
    board = DeviceBoard(lambda _: ["cuda:0", "cuda:1"], reputation=reputation)
    reputation.announce((None, "cuda:0"))
    assert [board.assign(name, ["a", "b", "c"]) for name in "abc"] == ["cuda:1"] * 3
    board.refuse("a")
    assert board.assign("d", []) == "cuda:0"


def test_a_device_that_gave_wrong_values_comes_last_and_no_gpu_is_shared_for_that(
    reputation: Reputation,
) -> None:
    reputation.distrust((None, "cpu:0"))
    reputation.distrust((None, "cuda:0"))
    board = DeviceBoard(lambda _: ["cpu:0", "cpu:1"], reputation=reputation)
    assert [board.assign(name, ["b", "c"]) for name in "bc"] == ["cpu:1"] * 2
    board.refuse("b")
    assert board.assign("d", []) == "cpu:0", "there is no other"
    gpus = DeviceBoard(lambda _: ["cuda:0", "cuda:1"], reputation=reputation)
    assert [gpus.assign(name, ["b", "c"]) for name in "bc"] == ["cuda:1", "cuda:0"]


def test_a_device_that_is_doubted_comes_last_as_long_as_it_is(reputation: Reputation) -> None:
    board = DeviceBoard(lambda _: ["cpu:0", "cpu:1"], reputation=reputation)
    reputation.doubt((0, "cpu:0"))
    assert [board.assign(name, ["a", "b"]) for name in "ab"] == ["cpu:1"] * 2
    assert not board.distrusts(0)
    reputation.doubt((0, "cpu:1"))
    assert board.distrusts(0) and not board.distrusts(1), "of that node"
    reputation.trust((0, "cpu:0"), fit=True)
    assert board.assign("c", ["a", "b"]) == "cpu:0"


def test_where_processes_are_is_told_until_their_exit_is_known(roster: ArmRoster) -> None:
    roster.start("worker", "warm")
    roster.start("worker", "warm")
    assert roster.spots_in_use() == {(0, "cpu:0@n0"), (1, "cpu:0@n1")}
    roster.exited(Exited(process="w1", exit_code=0, signal=None, time_ns=0))
    assert roster.spots_in_use() == {(0, "cpu:0@n0")}
    assert roster.spot_of("w1") == (1, "cpu:0@n1"), "its failure may be declared later"
    assert roster.spot_of("nobody") is None


def test_a_node_of_which_each_device_gave_wrong_values_comes_last(
    roster: ArmRoster, nodes: FakeNodes
) -> None:
    roster.start("worker", "warm")
    roster.start("worker", "warm")
    roster.distrust("w0")
    roster.exited(Exited(process="w0", exit_code=0, signal=None, time_ns=0))
    roster.start("worker", "warm")
    assert nodes.started[-1] == ("w2", 1, "cpu:0@n1"), "though node 0 lacks a process"


def test_when_no_node_takes_it_the_last_reason_is_said(roster: ArmRoster, nodes: FakeNodes) -> None:
    nodes.refuses = {0, 1}
    with pytest.raises(InfrastructureError, match=r"can start on: node [01]: the power failed"):
        roster.start("worker", "warm")
    nodes.there = ()
    with pytest.raises(InfrastructureError, match="no node has a device"):
        roster.start("worker", "warm")


def test_nodes_that_do_not_answer_are_asked_again_for_a_while(
    roster: ArmRoster, nodes: FakeNodes
) -> None:
    nodes.answers_after = 5
    name = roster.start("worker", "warm").name
    assert nodes.started == [(name, 1, "cpu:0@n1")] and nodes.asked == 6
    nodes.asked, nodes.answers_after = 0, 1000
    with pytest.raises(InfrastructureError, match="the power failed"):
        roster.start("worker", "warm")
    assert nodes.asked == 2 * PATIENCE_S, (
        "each of two nodes once a second for as long as they are given"
    )


def test_a_node_whose_device_is_refused_takes_nobody(
    roster: ArmRoster, nodes: FakeNodes, asked_ns: dict[str, int]
) -> None:
    assert [roster.start("worker", "warm").name for _ in range(2)] == ["w0", "w1"]
    roster.refuse_device("w0")
    roster.exited(Exited(process="w0", exit_code=None, signal=9, time_ns=1))
    roster.start("spare", "warm")
    assert nodes.started[-1] == ("s2", 1, "cpu:0@n1")
    assert roster.there() == ["w1", "s2"] and roster.gone("w0")
    asked_ns["w1"] = 5
    assert roster.living() == ["s2"]
    roster.ended(Leftovers(processes=[], ports=[], shared_memory=[]))


# ---- keepers


class FakeKeeperHost:
    """Keepers that say their port as soon as they are started. ``lost``: nodes that take nobody."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.vanishes: set[int] = set()  # lost in the very moment
        self.started: list[KeeperConfig] = []
        self.told: list[tuple[str, Message]] = []
        self.reports: list[Report] = []

    def takes(self, node: int) -> bool:
        return node not in self.lost

    def address(self, node: int) -> str:
        return f"10.0.0.{node}"

    def start(self, process: str, config: KeeperConfig) -> int:
        if config.node in self.vanishes:
            raise ConnectionError("gone")
        self.started.append(config)
        payload = {"port": 1000 + len(self.started)}
        self.reports.append(
            MessageReceived(process=process, message=Extra(topic=TOPIC, payload=payload))
        )
        return len(self.started)

    def alive(self, process: str) -> bool:
        return False

    def send(self, process: str, message: Message) -> bool:
        self.told.append((process, message))
        return True

    def signal(self, process: str, signum: int) -> None:
        """They are gone at once."""

    def os_state(self, process: str) -> str:
        return "R"

    def wait(self, timeout_s: float) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def close(self) -> dict[int, str]:
        return {}


def keepers_of(keeper_host: FakeKeeperHost) -> Keepers:
    return Keepers(keeper_host, job="job", nodes=2, limit_bytes=1, replicate=True)


def lose(keeper_host: FakeKeeperHost, process: str) -> None:
    keeper_host.reports.append(Exited(process=process, exit_code=None, signal=9, time_ns=1))


def starts(keepers: Keepers) -> list[tuple[str, int]]:
    return [(news.process, news.node) for news in keepers.look() if isinstance(news, KeeperStarted)]


def test_keepers_listen_at_their_nodes_addresses_and_know_each_other_by_them() -> None:
    keeper_host = FakeKeeperHost()
    keepers = keepers_of(keeper_host)
    assert starts(keepers) == [("k0", 0), ("k1", 1)]
    assert [config.host for config in keeper_host.started] == ["10.0.0.0", "10.0.0.1"]
    peers = {
        name: message.payload["peers"]
        for name, message in keeper_host.told
        if isinstance(message, Extra)
    }
    assert peers == {"k0": {"1": ["10.0.0.1", 1002]}, "k1": {"0": ["10.0.0.0", 1001]}}


@pytest.mark.parametrize("how", ["lost", "vanishes"])
def test_a_lost_node_lacks_a_keeper_until_it_is_back(how: str) -> None:
    keeper_host = FakeKeeperHost()
    keepers = keepers_of(keeper_host)
    keepers.look()
    getattr(keeper_host, how).add(1)
    lose(keeper_host, "k1")
    assert starts(keepers) == [] and starts(keepers) == []
    getattr(keeper_host, how).clear()
    ((name, node),) = starts(keepers)
    assert node == 1 and keepers.keeper_of(1) == name
    assert starts(keepers) == []


def test_nobody_follows_a_keeper_once_they_are_ended() -> None:
    keeper_host = FakeKeeperHost()
    keepers = keepers_of(keeper_host)
    keepers.look()
    keeper_host.lost.add(1)
    lose(keeper_host, "k1")
    keepers.look()
    keepers.end(limit_s=0.1)
    keeper_host.lost.clear()
    assert starts(keepers) == []


def test_a_node_that_is_lost_before_its_first_keeper_ends_the_beginning_in_words() -> None:
    keeper_host = FakeKeeperHost()
    keeper_host.vanishes.add(1)
    with pytest.raises(InfrastructureError, match="node 1 was lost before its keeper had started"):
        keepers_of(keeper_host)
