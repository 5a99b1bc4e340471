"""Which nodes an arm ran on, who of them was hit, and how reports name them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import arms
from tests.support.clusters.nodelogs import Clock, on_nodes
from tests.support.logs import MS, Line, Script
from tests.support.pages import sample_results
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.record.nodes import nodes_of
from trainchaos.harness.judge.results import ArmResult, NodeResult, Results
from trainchaos.harness.run.progress import describe
from trainchaos.reports import html, markdown, trace
from trainchaos.reports.outlets import terminal


def lost() -> Script:
    """An arm on nodes of two ranks of which node 1 is lost half way."""
    script = on_nodes(arms.hot_spare(), Clock(), bound_ns=100_000, every_ms=100)
    about = {"node": 1, "why": "the container exited with code 137"}
    script.lines.append(Line(ORCHESTRATOR, Kind.NODE_LOST, 2_500 * MS, 1, None, about))
    return script


def test_nodes_of_an_arm_and_how_they_were_lost() -> None:
    found = {node.node: node for node in nodes_of(lost().log())}
    assert [(n.node, n.host, n.processes) for n in found.values()][:3] == [
        (0, "host0", ["w0", "w1", "s0"]),
        (1, "host1", ["w2", "w3"]),
        (2, "host2", []),
    ]
    assert {node.address for node in found.values()} == {"10.0.0.1"}
    (why,) = found[1].lost
    assert re.fullmatch(r"after 1\.\d\d s: the container exited with code 137", why)
    assert found[0].lost == found[2].lost == []
    assert 0.0001 <= found[0].clock_bound_s < 0.00013
    assert found[2].clock_bound_s == 0, "nobody ran there"


def test_nodes_that_are_names_only_are_on_the_own_host() -> None:
    script = arms.hot_spare()
    assert nodes_of(script.log()) == [], "no nodes, no rows"
    for line in script.find(Kind.PROCESS_SPAWNED):
        line.data["node"] = 0
    assert nodes_of(script.log()) == [], "one node is the machine"
    script.find(Kind.PROCESS_SPAWNED)[-1].data["node"] = 1
    assert [(n.node, n.host, n.address) for n in nodes_of(script.log())] == [
        (0, "here", ""),
        (1, "here", ""),
    ]


def test_an_incident_knows_its_node() -> None:
    (incident,) = measure(lost().log(), None).incidents
    assert incident.nodes == [1]
    script = lost()
    script.edit(Kind.FAULT_INJECTED, {"target": {"node": 2, "processes": ["w0", "w2"]}})
    (incident,) = measure(script.log(), None).incidents
    assert incident.nodes == [0, 1, 2]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[RunDirectory, Results, Incident]:
    """A run whose faulted arms had two nodes, one of them lost in the first."""
    run, results = sample_results.build(tmp_path / "run")

    def node(number: int, arm: ArmResult, *lost: str) -> NodeResult:
        host = "gpu" if arm.arm == "faulted" else "other"
        return NodeResult(
            node=number,
            host=f"{host}0{number}",
            address=f"10.9.0.{number + 2}",
            devices=["cuda:0"],
            processes=[f"w{2 * number}", f"w{2 * number + 1}"],
            lost=list(lost),
            clock_bound_s=0.0004,
        )

    first = results.faults[0]
    changed = [
        arm.model_copy(
            update={
                "nodes": [node(0, arm), node(1, arm, *(["after 3.50 s: gone"] if n == 1 else []))]
            }
        )
        for n, arm in enumerate(results.arms)
    ]
    faults = [incident.model_copy(update={"nodes": [1]}) for incident in results.faults]
    return run, results.model_copy(update={"arms": changed, "faults": faults}), first


@pytest.mark.long
def test_reports_name_the_nodes(stored: tuple[RunDirectory, Results, Incident]) -> None:
    run, results, _ = stored
    arm = results.arms[1].id
    page = html.render(run, results).read_text()
    nodes = page.split('<section id="nodes">', 1)[1].split("</section>", 1)[0]
    assert nodes.count("gpu01") == 1 and "10.9.0.3" in nodes and "w2, w3" in nodes
    assert f"{arm} after 3.50 s: gone" in nodes
    faults = page.split('<section id="faults">', 1)[1].split("</section>", 1)[0]
    assert faults.count("node 1 (gpu01)") == len(results.faults)
    summary = markdown.render(run, results).read_text()
    assert "| 1 | gpu01 | 10.9.0.3 | w2, w3 | 0.4 |" in summary
    assert f"  node 1 (gpu01) was lost in {arm} after 3.50 s: gone" in terminal.summary(
        results, run
    ).split("\n")
    records = json.loads(trace.render(run, results).read_text())["traceEvents"]
    threads = [r["args"]["name"] for r in records if r["name"] == "thread_name" and r["pid"] == 2]
    assert "w3 (node 1, gpu01) steps" in threads
    assert {"clocks right to ±0.4 ms"} == {
        r["args"]["labels"] for r in records if r["name"] == "process_labels"
    }


@pytest.mark.slow
def test_reports_of_one_machine_say_nothing_of_nodes(tmp_path: Path) -> None:
    run, results = sample_results.build(tmp_path / "run", logs=False)
    assert "Nodes" not in html.render(run, results).read_text()
    assert "### Nodes" not in markdown.render(run, results).read_text()


@pytest.mark.parametrize(
    ("kind", "data", "generation", "text"),
    [
        (Kind.NODE_LOST, {"node": 1, "why": "gone"}, 1, "! node 1 is lost: gone"),
        (Kind.NODE_JOINED, {"node": 1, "host": "gpu01"}, 2, "↻ node 1 is there (gpu01)"),
        (Kind.NODE_JOINED, {"node": 1, "host": "gpu01"}, 0, None),
    ],
)
def test_people_who_watch_hear_of_nodes(
    kind: Kind, data: dict[str, object], generation: int, text: str | None
) -> None:
    event = Event(
        kind=kind, actor=ORCHESTRATOR, seq=0, time_ns=0, generation=generation, step=None, data=data
    )
    assert describe(event) == text
