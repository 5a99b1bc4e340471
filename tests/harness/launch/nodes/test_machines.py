"""Nodes that are machines: what faults do to them, by way of sites and of those who know
processes.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.fault.base import Fault, Fidelity, Need
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.chaos.planning.listing import fault_entry
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.inject.sites import MissingTarget, OccurrenceTarget
from trainchaos.harness.inject.sites.link import LinkSite
from trainchaos.harness.inject.sites.node import NodeSite
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.episodes import _first_of
from trainchaos.harness.launch.nodes.by_process import GroupsByNode, LinksByNode
from trainchaos.harness.launchers.docker import Docker
from trainchaos.harness.launchers.local import Local

KINDS = plugins.load(plugins.FAULTS, Fault)
NODE_OF = {"w0": 0, "w1": 0, "w2": 1, "w3": 1}


class FakeMachines:
    """Two machines that do as they are told."""

    can_pause = True

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.states: dict[int, dict[str, Any]] = {
            n: {"state": "running", "machine": f"m{n}"} for n in (0, 1)
        }

    def kill(self, node: int) -> Mapping[str, Any]:
        self.told.append(("kill", node))
        return {"signal": "SIGKILL"}

    def pause(self, node: int) -> None:
        self.states[node]["state"] = "paused"

    def resume(self, node: int) -> None:
        self.states[node]["state"] = "running"

    def limit_memory(self, node: int, spare_mib: int | None) -> None:
        self.told.append(("memory", node, spare_mib))

    def limit_cores(self, node: int, cores: float | None) -> None:
        self.told.append(("cores", node, cores))

    def isolate(self, node: int, *, outward: bool = True, inward: bool = True) -> None:
        self.told.append(("isolate", node))

    def rejoin(self, node: int) -> None:
        self.told.append(("rejoin", node))

    def seen(self, node: int) -> Mapping[str, Any]:
        return dict(self.states[node])


class FakeLinks:
    """Of nodes."""

    def __init__(self) -> None:
        self.shaped: list[tuple[tuple[str, str], ...]] = []
        self.shapes: dict[tuple[str, str], LinkShape] = {}

    def refuses(self, link: tuple[str, str]) -> str | None:
        return "both ends are on one node" if link[0] == link[1] else None

    def over(self, link: tuple[str, str]) -> tuple[str, str]:
        return link

    def shape(self, links: Sequence[tuple[str, str]], shape: LinkShape) -> str:
        self.shaped.append(tuple(links))
        self.shapes |= dict.fromkeys(links, shape)
        return "a fake"

    def probe(self, link: tuple[str, str]) -> int:
        return int(link[1])

    def probed(self, number: int) -> Mapping[str, Any] | None:
        return {"round_trip_s": 0.1, "mbit_per_s": float(number)}


class FakeScene:
    """Two nodes with two ranks each."""

    def __init__(self) -> None:
        topology = Topology(ranks=4, nodes=2)
        self.setup: Any = SimpleNamespace(
            cell=SimpleNamespace(scenario=SimpleNamespace(topology=topology))
        )
        self.machines: FakeMachines | None = FakeMachines()
        self.nodes = FakeLinks()
        self.links: Any = LinksByNode(self.nodes, NODE_OF.__getitem__)
        self.groups: Any = GroupsByNode(self.machines, NODE_OF.__getitem__)
        self.in_force = ActiveEffects()
        self.signals: list[tuple[str, int]] = []
        self.sent: list[tuple[str, Any]] = []
        self.state = "S"

    @property
    def surface(self) -> Any:
        """What faults touch is kept beside the rest."""
        return self

    def process_of(self, rank: int) -> str | None:
        return f"w{rank}"

    def node_of(self, process: str) -> int | None:
        return NODE_OF.get(process)

    def on_node(self, node: int) -> list[str]:
        return [name for name, home in NODE_OF.items() if home == node]

    def signal(self, process: str, signum: int) -> None:
        self.signals.append((process, signum))

    def send(self, process: str, message: Any) -> bool:
        self.sent.append((process, message.payload))
        return True

    def os_state(self, process: str) -> str:
        return self.state


def planned(kind: str, params: Mapping[str, Any], **where: Any) -> tuple[PlannedFault, Fault]:
    nowhere: dict[str, Any] = {
        "ranks": (),
        "spares": (),
        "checkpoint": None,
        "points": (),
        "event": None,
        "nth": 1,
    }
    when: dict[str, Any] = {"duration_s": None, "duration_steps": None, "max_fires": 1}
    plan = PlannedFault(id="f", kind=kind, params=dict(params), seed=1, **nowhere, **when, **where)
    return plan, KINDS[kind](**params)


def node_aim(scene: FakeScene, kind: str, **params: Any) -> tuple[Fault, OccurrenceTarget]:
    plan, fault = planned(kind, params, nodes=(1,))
    (aim,) = NodeSite(scene).aims(plan, fault, 0)  # type: ignore[arg-type]
    assert isinstance(aim, OccurrenceTarget) and aim.look is not None
    return fault, aim


def link_aim(
    scene: FakeScene, kind: str, links: Sequence[tuple[int, int]], **params: Any
) -> tuple[Fault, OccurrenceTarget]:
    plan, fault = planned(kind, params, links=tuple(links))
    (aim,) = LinkSite(scene).aims(plan, fault, 0)  # type: ignore[arg-type]
    assert isinstance(aim, OccurrenceTarget) and aim.look is not None
    return fault, aim


def test_node_kill_kills_the_machine_and_the_platform_says_so() -> None:
    scene = FakeScene()
    assert scene.machines is not None
    fault, aim = node_aim(scene, "node-kill")
    assert fault.act(aim.target) == {"machines": {"1": {"signal": "SIGKILL"}}}
    assert scene.machines.told == [("kill", 1)] and scene.signals == []
    assert aim.look is not None and aim.look() is None, "it has not ended yet"
    scene.machines.states[1] = {"state": "exited", "machine": "m1", "exit_code": 137}
    assert aim.look() == {"nodes": {"1": {"state": "exited", "machine": "m1", "exit_code": 137}}}
    scene.machines.states[1] = {"state": "running", "machine": "another"}
    assert aim.look() == {
        "nodes": {"1": {"state": "removed", "machine": "m1", "replaced_by": "another"}}
    }


def test_a_machine_without_processes_can_be_lost_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = FakeScene()
    assert scene.machines is not None
    monkeypatch.setattr(scene, "on_node", lambda node: [])
    plan, _ = planned("node-kill", {}, nodes=(1,))
    assert NodeSite(scene).reachable(plan)  # type: ignore[arg-type]
    fault, aim = node_aim(scene, "node-kill")
    fault.act(aim.target)
    assert scene.machines.told == [("kill", 1)]
    assert aim.look is not None and aim.look() is None, "no process is no evidence"
    scene.machines.states[1] = {"state": "exited", "machine": "m1", "exit_code": 137}
    assert aim.look() is not None
    scene.machines = None
    (missing,) = NodeSite(scene).aims(plan, fault, 0)  # type: ignore[arg-type]
    assert isinstance(missing, MissingTarget), "a name without processes is nothing"


def test_where_nodes_are_names_their_processes_are_killed() -> None:
    scene = FakeScene()
    scene.machines = None
    fault, aim = node_aim(scene, "node-kill")
    fault.act(aim.target)
    assert scene.signals == [("w2", 9), ("w3", 9)]


def test_node_stop_pauses_the_machine_if_it_can_be_paused_else_stops_its_processes() -> None:
    scene = FakeScene()
    assert scene.machines is not None
    fault, aim = node_aim(scene, "node-stop")
    fault.act(aim.target)
    assert aim.look is not None and aim.look()["nodes"]["1"]["state"] == "paused"  # type: ignore[index]
    for _ in range(2):
        fault.heal(aim.target)
    assert scene.machines.states[1]["state"] == "running" and scene.signals == []
    scene.machines.can_pause = False
    fault.act(aim.target)
    assert scene.signals == [("w2", 19), ("w3", 19)] and aim.look() is None
    scene.state = "T"
    assert aim.look() == {"os_state": "T", "processes": ["w2", "w3"]}
    fault.heal(aim.target)
    assert scene.signals[2:] == [("w2", 18), ("w3", 18)]


@pytest.mark.parametrize("machines", [True, False])
def test_what_two_faults_stop_goes_on_when_both_are_over(machines: bool) -> None:
    scene = FakeScene()
    assert scene.machines is not None
    scene.machines.can_pause = machines
    (fault, first), (_, second) = node_aim(scene, "node-stop"), node_aim(scene, "node-stop")
    fault.act(first.target)
    fault.act(second.target)
    told = len(scene.signals)
    fault.heal(first.target)
    assert scene.machines.states[1]["state"] == ("paused" if machines else "running")
    assert len(scene.signals) == told
    fault.heal(second.target)
    assert scene.machines.states[1]["state"] == "running"
    went_on = [(name, signal.SIGCONT) for name, node in NODE_OF.items() if node == 1]
    assert scene.signals[told:] == ([] if machines else went_on)


def test_node_slow_limits_the_machine_once_and_counts_from_then() -> None:
    scene = FakeScene()
    assert scene.machines is not None
    scene.machines.states[1]["throttled"] = 5
    fault, aim = node_aim(scene, "node-slow", cores=0.5)
    fault.act(aim.target)
    assert scene.machines.told == [("cores", 1, 0.5)]
    assert aim.look is not None and aim.look() is None
    scene.machines.states[1]["throttled"] = 8
    assert aim.look() == {"throttled": 3}
    for _ in range(2):
        fault.heal(aim.target)
    assert scene.machines.told[1:] == [("memory", 1, None), ("cores", 1, None)]


def test_memory_is_limited_for_the_node_of_a_process() -> None:
    machines = FakeMachines()
    groups = GroupsByNode(machines, NODE_OF.__getitem__)
    machines.states[1]["oom_kills"] = 2
    groups.limit_memory("w3", 32)
    assert machines.told == [("memory", 1, 32)] and groups.oom_kills("w3") == 0
    machines.states[1]["oom_kills"] = 3
    assert (
        groups.oom_kills("w3") == 1
        and groups.oom_kills("w0") == 0
        and list(groups.undo("w3")) == []
    )
    groups.release("w0")
    assert len(machines.told) == 1, "nothing was limited there"


def test_links_of_ranks_are_those_of_their_nodes_once() -> None:
    scene = FakeScene()
    fault, aim = link_aim(scene, "link-delay", [(2, 0), (2, 1), (2, 3), (3, 0)], delay_ms=5)
    assert aim.who["links"] == [[2, 0], [2, 1], [3, 0]], "2 and 3 are on one node"
    assert fault.act(aim.target)["by"] == "a fake"
    assert scene.nodes.shaped == [(("1", "0"),)]
    assert aim.look is not None
    assert aim.look() == {"link": [2, 0], "by": "a fake", "round_trip_s": 0.1, "mbit_per_s": 0.0}


def test_a_nodes_links_to_itself_are_left_out() -> None:
    links = FakeLinks()
    LinksByNode(links, NODE_OF.__getitem__).shape(
        [("w2", "w3"), ("w3", "w0")], LinkShape(blocked=True)
    )
    assert links.shaped == [(("1", "0"),)]


def test_a_link_within_a_node_is_missed_with_the_reason() -> None:
    plan, fault = planned("link-delay", {"delay_ms": 5}, links=((2, 3),))
    (miss,) = LinkSite(FakeScene()).aims(plan, fault, 0)  # type: ignore[arg-type]
    assert isinstance(miss, MissingTarget) and miss.reason == "both ends are on one node"


def test_a_bucket_is_told_to_the_sources_and_needs_no_links() -> None:
    scene = FakeScene()
    scene.links = None
    fault, aim = link_aim(scene, "link-throttle", [(2, 0), (2, 1)], mbit_per_s=8)
    fault.act(aim.target)
    fault.heal(aim.target)
    told = [("w2", {"bytes_per_s": rate, "latency_s": 0}) for rate in (1e6, None)]
    assert scene.sent == told and aim.look is not None and aim.look() is None
    plan, other = planned("link-throttle", {"mbit_per_s": 8, "method": "links"}, links=((2, 0),))
    assert isinstance(LinkSite(scene).aims(plan, other, 0)[0], MissingTarget)  # type: ignore[arg-type]


def test_an_isolated_node_keeps_its_coordinator_unless_it_is_to_be_cut() -> None:
    scene = FakeScene()
    assert scene.machines is not None
    fault, aim = link_aim(scene, "node-isolate", [(2, 0), (3, 0)])
    fault.act(aim.target)
    assert scene.machines.told == [] and set(scene.nodes.shaped[0]) == {("1", "0"), ("0", "1")}
    fault, aim = link_aim(scene, "node-isolate", [(2, 0), (3, 0)], control="cut")
    fault.act(aim.target)
    for _ in range(2):
        fault.heal(aim.target)
    assert scene.machines.told == [("isolate", 1), ("rejoin", 1), ("rejoin", 1)]
    scene.machines = None
    with pytest.raises(RuntimeError, match="only names"):
        fault.act(aim.target)


def test_links_are_real_where_the_kernel_has_them() -> None:
    columns = fault_entry(
        "link-delay", KINDS["link-delay"], {"docker": Docker, "local": Local}
    ).columns
    assert (columns["docker"], columns["local"]) == ("real", "emulated")
    throttle = KINDS["link-throttle"]
    shown = fault_entry("link-throttle", throttle, {"docker": Docker, "local": Local}).columns
    assert (shown["docker"], shown["local"]) == ("emulated (real by links)", "emulated")
    real = frozenset({Need.LINKS})
    assert throttle(mbit_per_s=1, method="links").acts(cuda=False, real=real) is Fidelity.REAL
    assert throttle(mbit_per_s=1).acts(cuda=False, real=real) is Fidelity.EMULATED
    assert KINDS["node-isolate"](control="cut").wants() - Local.offers == {Need.MACHINES}


def test_ranks_cut_off_with_their_supervisor_are_one_incident() -> None:
    cut = Episode(
        fault="f",
        kind="node-isolate",
        occurrence=0,
        process=None,
        rank=None,
        planned=None,
        injected=None,
        landed=None,
        failed=None,
        healed=None,
        failure=None,
        target={"links": [[2, 0]], "processes": {"0": "w0", "2": "w2", "3": "w3"}},
    )
    first, second, later = hung("w2", 1), hung("w3", 1), hung("w3", 2)
    assert _first_of(cut, [first, second, hung("w1", 1), later]) == [first, second]
    assert _first_of(cut, []) == []


def hung(process: str, generation: int) -> Event:
    data = {"failure": 1, "cause": "hang", "process": process, "rank": 1, "detail": "did not leave"}
    return Event(
        kind=Kind.FAILURE_DETECTED,
        actor="orchestrator",
        seq=0,
        time_ns=1,
        generation=generation,
        step=None,
        data=data,
    )
