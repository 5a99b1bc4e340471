"""Whole runs on nodes with agents of their own, processes of this machine: lost, replaced, and on
their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.run.test_real import MLP, run
from trainchaos.chaos.events.log import Event, Kind, Log, read_log
from trainchaos.harness.judge.results import Results

pytestmark = pytest.mark.real

NODES = "launcher: {kind: agents, nodes: 3}"
LOST = "[{id: lost, kind: node-kill, target: {node: 0}, at: {step: 20}}]"
SPARES = "{strategy: hot-spare, spares: 2}"
MEMORY = (
    "{kind: mlp, ranks: 4, steps: 60, global_batch: 16, checkpoint: {every: 50, memory: {every:"
    " 2}}}"
)


def log_of(tmp_path: Path, arm: str = "faulted") -> Log:
    """Of the only cell."""
    return read_log(tmp_path / "runs" / "real" / "latest" / "events" / f"default.r0.{arm}")


def one(log: Log, kind: Kind, **data: Any) -> Event:
    """The only event like that."""
    (event,) = [e for e in log.of(kind) if all(e.data[key] == value for key, value in data.items())]
    return event


def agreed(code: int, results: Results) -> None:
    """Every checker is satisfied."""
    bad = {
        name: f for c in results.cells for name, f in c.invariants.items() if f.verdict != "pass"
    }
    assert not bad
    assert code == 0, results.reason


def structure(value: Any) -> Any:
    """Keys of nested mappings, without what they hold."""
    if isinstance(value, dict):
        return {key: structure(each) for key, each in value.items()}
    return [structure(each) for each in value[:1]] if isinstance(value, list) else None


def nobody_left(tmp_path: Path) -> bool:
    """Whether no process was started by a run below that directory and lives."""
    own = str(tmp_path).encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if own in Path(f"/proc/{name}/cmdline").read_bytes():
                return False
        except OSError:
            continue
    return True


@pytest.mark.long
def test_a_lost_node_is_taken_over_by_a_spare_one_and_begins_anew(tmp_path: Path) -> None:
    code, results = run(tmp_path, workload=MLP, recovery=SPARES, faults=LOST, more=NODES)
    agreed(code, results)
    log = log_of(tmp_path)
    lost = one(log, Kind.NODE_LOST)
    assert (lost.data["node"], lost.data["why"]) == (0, "its agent has ended")
    exits = [e for e in log.of(Kind.PROCESS_EXITED) if e.data["process"] in ("w0", "w1")]
    assert [(e.data["signal"], e.data["expected"]) for e in exits] == [(9, False)] * 2
    assert all(lost.seq < e.seq for e in exits)
    where = {e.data["process"]: e.data["node"] for e in log.of(Kind.PROCESS_SPAWNED)}
    ready = [e for e in log.of(Kind.GENERATION_READY)]
    assert {where[name] for name in ready[1].data["members"]} == {1, 2}
    assert {e.data["node"] for e in log.of(Kind.NODE_JOINED)} == {0, 1, 2}
    for reading in log.of(Kind.PRESSURE_READ):
        assert {where[name] for name in reading.data["ranks"]} == {reading.data["node"]}
    (incident,) = results.faults
    assert incident.outcome == "recovered"
    assert nobody_left(tmp_path) and not (tmp_path / "runs/real/latest/agents").exists()

    (tmp_path / "local").mkdir()
    more = NODES.replace("agents", "local")
    _, local = run(tmp_path / "local", workload=MLP, recovery=SPARES, faults=LOST, more=more)
    ours, theirs = (structure(each.model_dump(mode="json")) for each in (results, local))
    assert ours["cells"] == theirs["cells"] and ours.keys() == theirs.keys()


@pytest.mark.long
def test_a_job_whose_only_node_is_lost_gives_up_and_is_judged(tmp_path: Path) -> None:
    more = NODES.replace("nodes: 3", "nodes: 1")
    code, results = run(tmp_path, workload=MLP, recovery=SPARES, faults=LOST, more=more)
    assert code == 1, results.reason
    assert "liveness: r0.faulted: the job did not finish: gave-up at step " in results.reason
    ended = one(log_of(tmp_path), Kind.RUN_FINISHED)
    assert ended.data["reason"].startswith("no node is left that w")
    assert nobody_left(tmp_path)


@pytest.mark.long
def test_memory_checkpoints_outlive_the_node_that_took_them(tmp_path: Path) -> None:
    code, results = run(
        tmp_path, workload=MEMORY, recovery="checkpoint-restart", faults=LOST, more=NODES
    )
    agreed(code, results)
    (incident,) = results.faults
    assert incident.restored_step is not None and incident.restored_step >= 18
    keepers = [e for e in log_of(tmp_path).of(Kind.PROCESS_SPAWNED) if e.data["role"] == "keeper"]
    assert [e.data["node"] for e in keepers[:3]] == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recovery", "fault"),
    [
        ("checkpoint-restart", LOST),
        (
            "drop-replica",
            "[{id: f, kind: process-kill, target: {rank: 2}, at: {step: 20, phase: backward}}]",
        ),
        (
            "hot-spare",
            "[{id: f, kind: process-stop, target: {rank: 1}, at: {step: 20, phase: optimizer}}]",
        ),
        ("drop-replica", "[{id: f, kind: store-kill, at: {step: 20}}]"),
        (
            "drop-replica",
            (
                "[{id: f, kind: link-delay, params: {delay_ms: 20}, target: {link: {src: 1, dst:"
                " 2}}, duration: 0.5, at: {step: 20}}]"
            ),
        ),
    ],
)
def test_what_works_on_one_machine_works_on_nodes(
    tmp_path: Path, recovery: str, fault: str
) -> None:
    agreed(*run(tmp_path, workload=MLP, recovery=recovery, faults=fault, more=NODES))


@pytest.mark.long
def test_nodes_go_on_alone_while_the_coordinator_is_away_and_what_fails_meanwhile_is_heard_later(
    tmp_path: Path,
) -> None:
    faults = (
        "[{id: away, kind: coordinator-kill, params: {down_s: 0.5}, at: {step: 19}}, "
        "{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 20}}]"
    )
    agreed(
        *run(
            tmp_path, workload=MLP.replace("60", "120"), recovery=SPARES, faults=faults, more=NODES
        )
    )
    log = log_of(tmp_path)
    adopted = one(log, Kind.COORDINATOR_ADOPTED)
    assert adopted.data["down_s"] >= 0.5
    assert not list(log.of(Kind.NODE_LOST)), "they dialled again in time"


@pytest.mark.long
def test_keepers_outlive_a_lost_coordinator_and_are_ended_with_the_job(tmp_path: Path) -> None:
    faults = "[{id: away, kind: coordinator-kill, params: {down_s: 0.3}, at: {step: 19}}]"
    workload = MEMORY.replace("60", "120")
    agreed(*run(tmp_path, workload=workload, recovery=SPARES, faults=faults, more=NODES))
    log = log_of(tmp_path)
    one(log, Kind.COORDINATOR_ADOPTED)
    keepers = [
        e.data["process"] for e in log.of(Kind.PROCESS_SPAWNED) if e.data["role"] == "keeper"
    ]
    assert keepers == ["k0", "k1", "k2"], "none had to be followed"
    exits = [e for e in log.of(Kind.PROCESS_EXITED) if e.data["process"] in keepers]
    assert len(exits) == 3 and all(e.data["expected"] for e in exits)
