"""Whole runs on containers: the same verdicts as on local processes, and nothing left behind
however they end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.support.clusters.docker_engine import engine, labelled
from tests.support.decided import decided
from tests.support.running import chaos_run
from trainchaos.chaos.cli import invoke
from trainchaos.harness.host import processes
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.run import heal
from trainchaos.harness.undo.containers import RemoveContainers
from trainchaos.harness.undo.ledger import read_open
from trainchaos.harness.undo.live import FILE
from trainchaos.harness.undo.records import MARKER

__all__ = ["engine"]
pytestmark = [pytest.mark.real, pytest.mark.docker]

INTERRUPTIONS = int(os.environ.get("CHAOS_INTERRUPTIONS", "6"))
LATEST_S = 12.0
LIMIT_S = 120.0
SCENARIO = """
version: 1
name: nodes
seed: 5
workload: {kind: mlp, ranks: 4, steps: STEPS, global_batch: 16, checkpoint: {every: 1000000}}
launcher: {kind: docker, nodes: 3}
recovery: {strategy: hot-spare, params: {spares: 2}}
baseline: none
faults: FAULTS
"""
LOSS = "[{id: loss, kind: node-kill, target: {node: 1}, at: {step: 12}}]"


def scenario(folder: Path, *, steps: int, faults: str = "[]") -> Path:
    """A file of it."""
    path = folder / "nodes.yaml"
    path.write_text(SCENARIO.replace("STEPS", str(steps)).replace("FAULTS", faults))
    return path


def events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    """Of that kind, of the orchestrator of the only arm."""
    (arm,) = run.arms()
    lines = (run.events(arm) / "orchestrator.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.smoke
def test_a_lost_node_is_replaced_by_a_spare_one_and_nothing_is_left(
    engine: Any, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    assert decided(scenario(tmp_path, steps=40, faults=LOSS), runs) == 0
    run = RunDirectory((runs / "nodes" / "latest").resolve())
    assert {event["data"]["node"] for event in events(run, "node_joined")} >= {0, 1, 2}
    assert [event["data"]["node"] for event in events(run, "node_lost")] == [1]
    addresses = {event["data"]["address"] for event in events(run, "node_joined")}
    assert len(addresses) == 3 and all(address.startswith("172.") for address in addresses)
    assert labels_left(engine, runs) == []
    assert read_open(run.ledger) == []


@pytest.mark.long
@pytest.mark.timeout(INTERRUPTIONS * (LATEST_S + LIMIT_S))
def test_interrupted_runs_leave_nothing(engine: Any, tmp_path: Path) -> None:
    draw, runs, pause = random.Random(7), tmp_path / "runs", Event()
    path = scenario(tmp_path, steps=1_000_000)
    seen = set[str]()
    for number in range(INTERRUPTIONS):
        signum = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)[number % 3]
        command = chaos_run(path, runs, "--seed", str(number))
        with (tmp_path / "said").open("ab") as said:
            harness = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        # The moment is drawn, not waited for: any is as good as another, those before the first
        # container too.
        pause.wait(draw.uniform(0.3, LATEST_S))
        seen |= set(labelled(engine))
        harness.send_signal(signum)
        harness.wait(timeout=LIMIT_S)
    heal.heal_all(runs)
    assert seen, "no run came so far as to have a container"
    assert labels_left(engine, runs) == []
    assert list(runs.glob(f"*/*/{FILE}")) == []
    markers = {
        json.loads(ledger.read_text().split("\n")[0])["undo"]["marker"] for ledger in ledgers(runs)
    }
    for marker in markers:
        entry = f"{MARKER}={marker}"
        assert [pid for pid, _ in processes.since(0) if processes.environment_has(pid, entry)] == []


def test_without_an_engine_a_run_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    assert invoke(["run", str(scenario(tmp_path, steps=40)), "--runs", str(tmp_path / "runs")]) == 7
    assert "no Docker engine runs here" in capsys.readouterr().out


def ledgers(runs: Path) -> list[Path]:
    """Of all runs below."""
    return [path for path in runs.glob("*/*/ledger.jsonl") if not path.parent.is_symlink()]


def labels_left(client: Any, runs: Path) -> list[str]:
    """What the engine still has of runs below a directory, by the labels that their
    ledgers name.
    """
    lines = [
        json.loads(line) for ledger in ledgers(runs) for line in ledger.read_text().splitlines()
    ]
    kind = RemoveContainers.model_fields["do"].default
    undos = [line["undo"] for line in lines if "undo" in line]
    return [name for undo in undos if undo["do"] == kind for name in labelled(client, undo["run"])]
