"""Nodes: who is where, and losing one or a rack of them at once, simulated and with real
processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.run.test_real import MLP, run
from tests.support.arms import judged
from tests.support.search.simulate import Played, cell_of, control_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.harness.arm.roster import Placement
from trainchaos.harness.judge.incident import Incident

ALL = ["checkpoint-restart", "drop-replica", "hot-spare"]
TWO = {"kind": "sim", "nodes": 2}
BOTH = (0, 1)


def test_workers_fill_nodes_in_blocks_and_spares_come_from_the_last_node() -> None:
    placement = Placement(Topology(ranks=4, nodes=2), spares=1)
    where = {f"w{n}": placement.place(f"w{n}", "worker", [], BOTH) for n in range(4)}
    where["s4"] = placement.place("s4", "spare", list(where), BOTH)
    assert where == {"w0": 0, "w1": 0, "w2": 1, "w3": 1, "s4": 1}
    assert placement.on(1, ["w0", "w3", "s4"]) == ["w3", "s4"], "only the living"


@pytest.mark.parametrize(
    ("ranks", "nodes", "spares", "where"),
    [
        (4, 3, 1, [2]),
        (4, 3, 2, [2, 2]),
        (4, 3, 5, [2, 2, 1, 0, 1]),
        (4, 4, 4, [3, 2, 1, 0]),
        (4, 5, 3, [4, 3, 2]),
        (2, 4, 3, [2, 3, 1]),
        (5, 4, 3, [3, 3, 2]),
        (4, 1, 2, [0, 0]),
    ],
)
def test_spares_fill_nodes_without_ranks_first(
    ranks: int, nodes: int, spares: int, where: list[int]
) -> None:
    place = Topology(ranks=ranks, nodes=nodes)
    assert [place.node_of_spare(index) for index in range(spares)] == where
    assert all(not place.ranks_on(node) for node in place.spare_nodes)


def test_replacements_go_where_somebody_is_missing() -> None:
    placement = Placement(Topology(ranks=4, nodes=2), spares=1)
    for name in ("w0", "w1", "w2", "w3"):
        placement.place(name, "worker", [], BOTH)
    placement.place("s4", "spare", [], BOTH)
    left = ["w0", "w1"]
    for name in ("s5", "s6", "s7"):
        assert placement.place(name, "spare", left, BOTH) == 1
        left.append(name)
    assert placement.place("s8", "spare", left, BOTH) == 0, "all are full: the emptiest"


def test_a_restart_of_everybody_fills_nodes_in_blocks_again() -> None:
    placement = Placement(Topology(ranks=4, nodes=2), spares=1)
    for name in ("w0", "w1", "w2", "w3"):
        placement.place(name, "worker", [], BOTH)
    placement.place("s4", "spare", [], BOTH)
    living: list[str] = []
    for name in ("w5", "w6", "w7", "w8"):
        placement.place(name, "worker", living, BOTH)
        living.append(name)
    assert [placement.on(node, living) for node in (0, 1)] == [["w5", "w6"], ["w7", "w8"]]


def test_a_node_that_is_lost_takes_nobody_and_spare_nodes_stand_in_for_it() -> None:
    placement = Placement(Topology(ranks=4, nodes=3), spares=0)
    for name in ("w0", "w1", "w2", "w3"):
        placement.place(name, "worker", [], (0, 1, 2))
    left = ["w2", "w3"]
    where = []
    for name in ("w4", "w5", "w6", "w7"):
        where.append(placement.place(name, "worker", left, (1, 2)))
        left.append(name)
    assert where == [2, 2, 1, 2], "the spare node as full as others, then the least loaded"
    assert placement.place("w8", "worker", left, (0, 1, 2)) == 0, "it is back"


def test_who_could_not_be_started_is_placed_anew() -> None:
    placement = Placement(Topology(ranks=3, nodes=3), spares=0)
    assert placement.place("w0", "worker", [], (0, 1, 2)) == 0
    assert placement.place("w7", "worker", [], (1, 2), again=True) == 1
    assert placement.place("w1", "worker", ["w7"], (1, 2)) == 1, (
        "its place is nobody else's to take"
    )
    assert placement.place("w2", "worker", ["w7", "w1"], [1]) == 1, "its own node is not there"


def arm(
    recovery: Any, root: Path, fault: dict[str, Any], **more: Any
) -> tuple[Played, list[Incident]]:
    """A faulted arm with which every checker agrees, and its incidents."""
    cell = cell_of(recovery, [{"id": "f", "at": {"step": 33}, **fault}], **more)
    faulted, control = play(cell, root, seed=3), control_of(cell, seed=3)
    found = evidence(faulted, control)
    assert {n: f.witness for n, f in judged(found).items() if f.verdict != "pass"} == {}
    assert faulted.outcome == "completed"
    return faulted, list(found.measures.incidents)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("recovery", [*ALL, {"strategy": "hot-spare", "spares": 4}], ids=str)
def test_a_lost_node_is_one_incident_and_its_steps_count_once(recovery: Any, memory: Path) -> None:
    faulted, (incident,) = arm(
        recovery, memory, {"kind": "node-kill", "target": {"node": 1}}, launcher=TWO
    )
    exits = [e for e in faulted.log.of(Kind.FAILURE_DETECTED) if e.data["cause"] == "exit"]
    assert {"w2", "w3"} <= {e.data["process"] for e in exits} | {
        name for name in incident.target["processes"] if recovery == "checkpoint-restart"
    }
    assert (incident.outcome, incident.detected_by) == ("recovered", "exit")
    assert incident.steps_lost == (2 if recovery == "checkpoint-restart" else 0)
    placed = {e.data["process"]: e.data["node"] for e in faulted.log.of(Kind.PROCESS_SPAWNED)}
    assert {placed[name] for name in incident.target["processes"]} == {1}


def test_two_kills_answered_by_one_rollback_lose_its_steps_once(memory: Path) -> None:
    kill = {"id": "kill", "kind": "process-kill", "target": {"rank": 2}, "at": {"step": 33}}
    again = {
        "id": "again",
        "kind": "process-kill",
        "target": {"rank": 1},
        "at": {"event": "regroup"},
    }
    cell = cell_of("checkpoint-restart", [kill, again])
    found = evidence(play(cell, memory, seed=3), control_of(cell, seed=3))
    incidents = found.measures.incidents
    assert [incident.detected_by for incident in incidents] == ["exit", "exit"]
    assert [incident.steps_lost for incident in incidents] == [2, 0]


def test_a_lost_spare_is_replaced_and_training_does_not_notice(memory: Path) -> None:
    faulted, (incident,) = arm("hot-spare", memory, {"kind": "spare-kill"})
    assert incident.outcome == "masked"
    spares = [
        e.data["process"] for e in faulted.log.of(Kind.PROCESS_SPAWNED) if e.data["role"] == "spare"
    ]
    assert (spares, len(list(faulted.log.of(Kind.GENERATION_STARTED)))) == (["s4", "s5"], 1)


@pytest.mark.real
@pytest.mark.parametrize(
    "recovery",
    [
        pytest.param("checkpoint-restart", marks=pytest.mark.long),
        pytest.param("drop-replica", marks=pytest.mark.long),
        pytest.param("{strategy: hot-spare, spares: 4}", marks=pytest.mark.long),
    ],
)
def test_a_real_node_is_lost_and_replaced(tmp_path: Path, recovery: str) -> None:
    faults = "[{id: f, kind: node-kill, target: {node: 1}, at: {step: 20}}]"
    nodes = "launcher: {kind: local, nodes: 2}"
    code, results = run(tmp_path, workload=MLP, recovery=recovery, faults=faults, more=nodes)
    broken = {
        name: f for c in results.cells for name, f in c.invariants.items() if f.verdict != "pass"
    }
    assert (broken, code) == ({}, 0)
    (incident,) = results.faults
    assert incident.outcome == "recovered"
    assert len(incident.target["processes"]) >= 2
