"""Tainted places: where processes start instead, and runs that have too few others."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.launch.nodes.test_nodes_real import log_of
from tests.harness.run.test_real import KILL, MLP, run
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.harness.arm.roster import ArmRoster, Placement
from trainchaos.harness.explain.incident_places import read_places
from trainchaos.harness.launch.nodes import untainted
from trainchaos.harness.launch.places.seats import (
    UNTAINTED,
    Tainted,
    rooms,
    seats,
    shortage,
    tainted_places,
)
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.health.taints import Taint, TaintList, made, names_of, of_place, same_host

NOW = datetime.now(UTC)
HERE = socket.gethostname()
CPU = {0: ["cpu:0@n0", "cpu:1@n0"], 1: ["cpu:0@n1", "cpu:1@n1"], 2: ["cpu:0@n2"]}
NAMES = names_of({0: "a", 1: "b", 2: "c"})


def taint(place: str, **more: Any) -> Taint:
    fields = {"reason": "XID 79", "since": NOW - timedelta(hours=1), "by": "person"}
    return made({**of_place(place), **fields, **more})


@pytest.fixture
def tainted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Taints places in the list that launchers read."""
    path = tmp_path / "taints.yaml"
    monkeypatch.setenv("CHAOS_TAINTS", str(path))

    def add(*places: str) -> None:
        for place in places:
            assert TaintList(path).add(taint(place), NOW)

    return add


def cell(ranks: int, nodes: int) -> Any:
    topology = Topology(ranks=ranks, nodes=nodes)
    return SimpleNamespace(scenario=SimpleNamespace(topology=topology))


# ---- names


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("host-a", "HOST-A", True),
        ("host-a", "host-a.example.com", True),
        ("host-a.example.org", "host-a.example.com", False),
        ("host-a", "host-ab", False),
        ("1", "1.2.3.4", False),
        ("10.0.0.1", "10.0.0.1", True),
    ],
)
def test_which_names_mean_one_host(one: str, other: str, same: bool) -> None:
    assert same_host(one, other) == same_host(other, one) == same


def test_a_number_means_a_node_only_where_its_host_does_not() -> None:
    assert names_of({0: "a", 1: "b"}) == {0: ("a",), 1: ("b",)}
    assert names_of({0: "a", 1: "a", 2: "b"}) == {0: ("a", "0"), 1: ("a", "1"), 2: ("b",)}
    assert names_of({0: "a", 1: "b"}, emulated=True) == {0: ("a", "0"), 1: ("b", "1")}
    assert names_of({0: "a"}, emulated=True) == {0: ("a",)}


def test_a_node_taints_its_devices_and_a_device_nothing_else() -> None:
    node, device = taint("a"), taint("b/cuda:1")
    assert node.means(["a"], "cuda:0") and not device.means(["a"], "cuda:1")
    assert device.means(["b"], "cuda:1")
    assert not device.means(["b"]) and not device.means(["b"], "cuda:0")


# ---- seats


def test_what_is_tainted_of_an_arm() -> None:
    other, one = taint("elsewhere"), taint("b/cpu:1", evidence={"xid": 79})
    found = tainted_places([other, one, taint("c")], NAMES, CPU)
    assert (found.nodes, found.devices) == ({2}, {"cpu:1@n1"})
    assert dict(found.room) == {2: 0}, "CPU slots are shared"
    assert [each.place for each in found.taints] == ["b/cpu:1", "c"], "not what is elsewhere"
    found = tainted_places([one, taint("b/cpu:0")], NAMES, CPU)
    assert found.nodes == {1}, "all its devices"
    gpus = {0: ["cuda:0@n0", "cuda:1@n0"]}
    found = tainted_places([taint("a/cuda:1")], names_of({0: "a"}), gpus)
    assert (found.nodes, dict(found.room)) == (frozenset(), {0: 1}), "GPUs are not"


@pytest.mark.parametrize(
    ("ranks", "nodes", "spares", "room", "workers", "waiting"),
    [
        (4, 3, 0, {}, (0, 0, 1, 1), ()),
        (4, 3, 0, {1: 0}, (0, 0, 2, 2), ()),
        (4, 3, 0, {0: 0}, (2, 2, 1, 1), ()),
        (4, 3, 0, {0: 1}, (0, 2, 1, 1), ()),
        (4, 3, 1, {0: 1}, (0, 2, 1, 1), (2,)),
        (4, 7, 2, {4: 0}, (0, 1, 2, 3), (6, 5)),
        (3, 4, 1, {3: 0}, (0, 1, 2), None),
        (4, 2, 0, {1: 0}, None, None),
    ],
)
def test_who_has_no_seat_gets_one_where_there_is_room(
    ranks: int,
    nodes: int,
    spares: int,
    room: dict[int, int],
    workers: tuple[int, ...] | None,
    waiting: tuple[int, ...] | None,
) -> None:
    found = seats(Topology(ranks=ranks, nodes=nodes), spares=spares, room=room)
    if workers is None or waiting is None:
        assert found is None
    else:
        assert found is not None and (found.workers, found.spares) == (workers, waiting)


def test_no_seat_is_ever_beyond_its_room() -> None:
    for ranks in range(1, 7):
        for nodes in range(1, 6):
            for spares in range(3):
                topology = Topology(ranks=ranks, nodes=nodes)
                most = rooms(topology, spares=spares)
                for bad in range(nodes):
                    found = seats(topology, spares=spares, room={bad: 0})
                    have = sum(count for node, count in most.items() if node != bad)
                    assert (found is not None) == (have >= ranks + spares)
                    assert found is None or (found.full <= most and not found.full[bad])


def test_too_few_places_are_said_with_what_to_do() -> None:
    found = tainted_places([taint("b")], NAMES, CPU)
    assert shortage(cell(4, 3), found, CPU, spares=0) is None
    said = shortage(cell(4, 3), found, CPU, spares=1)
    assert said is not None and said.startswith(
        "5 processes are to start, and nodes that are not tainted take 4: b (XID 79); add"
    )
    all_bad = tainted_places([taint(name) for name in "abc"], NAMES, CPU)
    assert "every place is tainted" in str(shortage(cell(4, 3), all_bad, CPU, spares=0))
    gpus = {0: [f"cuda:{index}" for index in range(4)]}
    one = tainted_places([taint("a/cuda:1")], NAMES, gpus)
    assert "4 processes need a GPU each, and 3 are not" in str(
        shortage(cell(4, 1), one, gpus, spares=0)
    )
    assert shortage(cell(3, 1), one, gpus, spares=0) is None
    assert shortage(cell(8, 1), one, gpus, spares=0) is None, "they are shared anyway"
    assert shortage(cell(4, 3), UNTAINTED, CPU, spares=9) is None


# ---- who is placed where


class FakeNodes:
    """A cluster of three nodes."""

    def __init__(self, tainted: Tainted) -> None:
        self.tainted = tainted
        self.there = [0, 1, 2]
        self.started: list[tuple[int, str]] = []

    def usable(self) -> list[int]:
        return self.there

    def places_on(self, node: int) -> list[str]:
        return CPU[node]

    def spawn(self, name: str, role: str, mode: str, device: str, node: int) -> int:
        self.started.append((node, device))
        return 100 + len(self.started)

    def now_ns(self) -> int:
        return 0

    def undo(self, name: str, pid: int) -> None:
        return None


def roster(nodes: FakeNodes) -> ArmRoster:
    setup: Any = SimpleNamespace(id="arm", cell=cell(4, 3))
    fake: Any = nodes
    return ArmRoster(setup, fake, Ledger(Path("unused")), {}, spares=0)


def test_ranks_and_replacements_avoid_tainted_places_while_there_are_others() -> None:
    nodes = FakeNodes(tainted_places([taint("a"), taint("b/cpu:0")], NAMES, CPU))
    arm = roster(nodes)
    for _ in range(4):
        arm.start("worker", "warm")
    assert nodes.started == [(2, "cpu:0@n2")] * 2 + [(1, "cpu:1@n1")] * 2
    arm.reputation.announce((None, "cpu:0@n2"))
    arm.start("worker", "warm")
    arm.reputation.trust((2, "cpu:0@n2"), fit=True)
    arm.start("worker", "warm")
    assert {node for node, _ in nodes.started} == {1, 2}
    assert (1, "cpu:0@n1") not in nodes.started, "a warning that ends lifts no taint"
    nodes.there = [0]
    arm.start("worker", "warm")
    assert nodes.started[-1][0] == 0, "there is no other"


def test_a_replacement_does_not_fill_a_tainted_node_that_lacks_a_process() -> None:
    placement = Placement(Topology(ranks=4, nodes=3), spares=0, room={0: 0})
    where = [placement.place(f"w{n}", "worker", [], (1, 2)) for n in range(4)]
    assert where == [2, 2, 1, 1]
    assert placement.place("w4", "worker", ["w0", "w1", "w2"], (0, 1, 2)) == 1


# ---- real runs


@pytest.mark.long
@pytest.mark.real
def test_a_local_run_avoids_a_tainted_device_also_for_its_spare_and_says_so(
    tmp_path: Path, tainted: Callable[..., None]
) -> None:
    tainted(f"{HERE}/cpu:1", "another-host")
    spare = "{strategy: hot-spare, spares: 1}"
    code, results = run(tmp_path, workload=MLP, recovery=spare, faults=KILL)
    assert code == 0, results.reason
    log = log_of(tmp_path)
    devices = [event.data["device"] for event in log.of(Kind.PROCESS_SPAWNED)]
    assert len(devices) >= 5 and "cpu:1" not in devices
    (said,) = log.of(Kind.TAINTS_HONOURED)
    assert [each["place"] for each in said.data["taints"]] == [f"{HERE}/cpu:1"]
    assert (said.data["nodes"], said.data["devices"]) == ([], ["cpu:1"])
    run_path = tmp_path / "runs" / "real" / "latest"
    history = read_places([run_path])
    assert history.arms == 2 and history.nodes[HERE].incidents == 0, "the run did it itself"
    assert history.nodes[HERE].used_s > 1.0 and history.devices == {}
    assert invoke(["taint", "list", "--history", str(run_path)]) == 0
    orchestrator = run_path / "events" / "default.r0.faulted" / "orchestrator.jsonl"
    lines = [line for line in orchestrator.read_text().splitlines() if '"fault_' not in line]
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "orchestrator.jsonl").write_text("\n".join(lines) + "\n")
    assert read_places([alone]).nodes[HERE].incidents == 1, "and nobody did it here"


@pytest.mark.real
@pytest.mark.long
def test_a_run_of_agents_starts_nothing_on_a_tainted_node(
    tmp_path: Path, tainted: Callable[..., None]
) -> None:
    tainted("0")
    code, results = run(
        tmp_path,
        workload=MLP,
        recovery="{strategy: checkpoint-restart}",
        faults=KILL,
        more="launcher: {kind: agents, nodes: 3}",
    )
    assert code == 0, results.reason
    log = log_of(tmp_path)
    nodes = [event.data["node"] for event in log.of(Kind.PROCESS_SPAWNED)]
    assert len(nodes) == 8 and set(nodes) == {1, 2}
    (said,) = log.of(Kind.TAINTS_HONOURED)
    assert said.data["nodes"] == [0] and said.data["taints"][0]["place"] == "0"


@pytest.mark.parametrize("kind", ["local", "agents"])
def test_a_run_without_untainted_places_does_not_start(
    tmp_path: Path,
    tainted: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    tainted("0")
    code, results = run(
        tmp_path,
        workload=MLP,
        recovery="{strategy: drop-replica}",
        more=f"launcher: {{kind: {kind}, nodes: 2}}",
    )
    assert code == 7
    (skipped,) = results.skipped
    assert "4 processes are to start, and nodes that are not tainted take 2: 0" in skipped.reason
    assert "chaos taint clear" in skipped.reason


def test_a_malformed_list_stops_a_run_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = "scenarios/kill-one-rank.yaml"
    path = tmp_path / "taints.yaml"
    path.write_text("version: 1\ntaints: 3\n")
    runs = ["--runs", str(tmp_path / "runs")]
    assert invoke(["run", scenario, "--taints", str(path), *runs]) == 2
    assert f"{path}:2: taints: Input should be a valid list" in capsys.readouterr().err
    assert invoke(["run", scenario, "--taints", str(tmp_path / "typo"), *runs]) == 2
    assert "no such list" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_this_machine_s_places_are_known_by_its_host(tainted: Callable[..., None]) -> None:
    tainted(f"{HERE}/cpu:1", "1")
    found = untainted.tainted_here({0: ["cpu:0", "cpu:1"]})
    assert (found.nodes, found.devices) == (frozenset(), {"cpu:1"})
    assert untainted.tainted_here({0: ["cpu:0"], 1: ["cpu:0"]}).nodes == {1}
