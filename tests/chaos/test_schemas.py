"""Stored files of another version: older ones are read, newer ones refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.log import read_log
from trainchaos.chaos.files import parse_model
from trainchaos.harness.compare.plan.directory import ComparisonPlan
from trainchaos.harness.compare.result.model import Comparison
from trainchaos.harness.gating.gate import GateResult
from trainchaos.harness.judge.results import Results

SCENARIO = """\
version: 1
name: small
launcher: sim
workload: {kind: mlp, ranks: 2, steps: 20, global_batch: 8, checkpoint: {every: 10}}
recovery: hot-spare
faults: [{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 12}}]
"""


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A stored run."""
    (tmp_path / "small.yaml").write_text(SCENARIO)
    assert invoke(["run", str(tmp_path / "small.yaml"), "--runs", str(tmp_path), "-q"]) == 0
    capsys.readouterr()
    return (tmp_path / "small" / "latest").resolve()


def rewrite(run: Path, version: int | None) -> None:
    """Give all logs of the run another version, or none."""
    for path in run.glob("events/*/orchestrator.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "run_started":
                del line["data"]["log_version"]
                line["data"] |= {"log_version": version} if version is not None else {}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_log_from_before_versions_is_judged(run: Path) -> None:
    rewrite(run, None)
    assert invoke(["analyze", str(run), "-q"]) == 0


def test_a_newer_log_is_refused_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(run, 9)
    with pytest.raises(LogError, match="version 9, and this chaos reads version 1: a newer one"):
        read_log(next(run.glob("events/*")))
    assert invoke(["analyze", str(run), "-q"]) not in (0, 1)
    said = capsys.readouterr()
    assert "version 9, and this chaos reads version 1" in said.out + said.err


@pytest.mark.parametrize("kind", [Results, ComparisonPlan, Comparison, GateResult])
def test_every_stored_model_of_a_newer_schema_is_refused(
    kind: type[Results | ComparisonPlan | Comparison | GateResult],
) -> None:
    """And for this reason alone, whatever else it holds."""
    with pytest.raises(ValueError, match="is of schema version 2, and this chaos reads version 1"):
        parse_model(b'{"schema_version": 2, "what": "is new"}', kind)
    with pytest.raises(ValueError) as missing:
        parse_model(b'{"schema_version": 1}', kind)
    assert "schema version" not in str(missing.value)
