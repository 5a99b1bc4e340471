"""A real job asks NCCL's RAS about a rank that hangs, and its word stands in log and judgement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands.unreported import unreported
from tests.support.fakes.ras_server import communicator, document, rank, ras_server
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind, read_actor
from trainchaos.recovery.detection import ras_watch
from trainchaos.recovery.process.local import RAS_ADDRESS

SCENARIO = """\
version: 1
name: skip
seed: 5
workload: {kind: mlp, ranks: 2, steps: 40, global_batch: 16, checkpoint: {every: 10, keep: 3}}
recovery: hot-spare
launcher: local
baseline: none
faults:
  - {id: skip, kind: collective-skip, target: {rank: 1}, at: {step: 20, phase: forward}}
"""


def spawned(runs: Path) -> dict[str, int]:
    """Process -> pid, as the run's log has them so far."""
    (log,) = runs.glob("skip/latest/events/*/orchestrator.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True)]
    found = [one["data"] for one in lines if one["kind"] == Kind.PROCESS_SPAWNED]
    return {one["process"]: one["pid"] for one in found}


@pytest.mark.real
def test_ras_bears_witness_of_a_skipped_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "skip.yaml").write_text(SCENARIO)
    runs = tmp_path / "runs"

    def answer() -> str:
        pids = spawned(runs)
        return document(communicator([rank(0, pid=pids["w0"]), rank(1, 40, pid=pids["w1"])]))

    with ras_server(answer) as server:
        monkeypatch.setattr(ras_watch, "EVERY_S", 0.0)  # a slow start may have had it asked
        monkeypatch.setenv(RAS_ADDRESS, server.address)
        unreported(["run", str(tmp_path / "skip.yaml"), "--runs", str(runs), "-q"])
        assert server.heard
    (log,) = runs.glob("skip/latest/events/*faulted/orchestrator.jsonl")
    events = read_actor(log).events
    assert events[0].actor == ORCHESTRATOR
    said = "lags: it has launched AllReduce 40 times, others 41"
    (hang,) = [one for one in events if one.kind is Kind.FAILURE_DETECTED]
    assert hang.data["process"] == "w1" and said in hang.data["ras"]
    (landed,) = [one for one in events if one.kind is Kind.FAULT_LANDED]
    assert landed.data["witness"] == "NCCL: RAS; supervisor: progress marks"
    assert landed.data["evidence"]["ras"] == hang.data["ras"]
    (seen,) = [e for e in events if e.kind is Kind.COLLECTIVES_DUMPED and e.data["role"] == "ras"]
    assert seen.data["process"] == "w1" and said in seen.data["why"]
