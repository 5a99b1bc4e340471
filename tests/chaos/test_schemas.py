"""Stored files of another version: older ones are read, newer ones refused by name."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.commands.unreported import unreported
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import NewerVersion
from trainchaos.chaos.events.log import read_log
from trainchaos.chaos.files import parse_model
from trainchaos.harness.compare.plan.directory import ComparisonPlan
from trainchaos.harness.compare.result.model import Comparison
from trainchaos.harness.gating.gate import GateResult
from trainchaos.harness.judge.results import Results

NEWER = "was written by a newer version ({}; this one reads up to {}): upgrade trainchaos"
SCENARIO = """\
version: 1
name: small
launcher: sim
workload: {kind: mlp, ranks: 2, steps: 20, global_batch: 8, checkpoint: {every: 10}}
recovery: hot-spare
faults: [{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 12}}]
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored run, to be copied."""
    place = tmp_path_factory.mktemp("stored")
    (place / "small.yaml").write_text(SCENARIO)
    assert unreported(["run", str(place / "small.yaml"), "--runs", str(place), "-q"]) == 0
    return (place / "small" / "latest").resolve()


@pytest.fixture
def run(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A stored run."""
    capsys.readouterr()
    return shutil.copytree(stored, tmp_path / "small" / stored.name)


def rewrite(run: Path, version: int | None) -> None:
    """Give all logs of the run another version, or none; it is not sealed then."""
    (run / "seal.json").unlink()
    for path in run.glob("events/*/orchestrator.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "run_started":
                del line["data"]["log_version"]
                line["data"] |= {"log_version": version} if version is not None else {}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_a_log_from_before_versions_is_judged(run: Path) -> None:
    rewrite(run, None)
    assert invoke(["analyze", str(run), "-q"]) == 0


@pytest.mark.slow
def test_a_newer_log_is_refused_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(run, 9)
    with pytest.raises(NewerVersion, match=re.escape(NEWER.format(9, 1))):
        read_log(next(run.glob("events/*")))
    before = (run / "results.json").read_bytes()
    refused(["analyze", str(run), "-q"], NEWER.format(9, 1), capsys)
    assert (run / "results.json").read_bytes() == before


def refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With these words, as a mistake of usage, and as nothing else."""
    assert invoke(argv) == 2
    said = capsys.readouterr()
    assert words in said.out + said.err and "damaged" not in said.out + said.err


@pytest.mark.slow
def test_a_newer_resolved_scenario_is_refused_by_name(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "scenario.resolved.yaml"
    path.write_text(path.read_text().replace("version: 1", "version: 2\n    novelty: 1"))
    for command in ("analyze", "report"):
        refused([command, str(run)], f"{path} {NEWER.format(2, 1)}", capsys)


@pytest.mark.slow
def test_newer_results_are_refused_by_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "results.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 3}))
    refused(["gate", str(run)], f"{path} {NEWER.format(3, 1)}", capsys)


def test_a_newer_plan_of_a_comparison_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text('{"schema_version": 2, "what": "is new"}')
    words = f"{tmp_path / 'plan.json'} {NEWER.format(2, 1)}"
    refused(["compare", str(tmp_path)], words, capsys)


@pytest.mark.slow
def test_a_newer_baseline_is_refused_by_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "baseline.json"
    path.write_text('{"kind": "trainchaos baseline", "schema_version": 2}')
    refused(["gate", str(run), "--baseline", str(path)], NEWER.format(2, 1), capsys)


def test_a_newer_scenario_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.yaml").write_text(SCENARIO.replace("version: 1", "version: 2"))
    words = "was written for a newer version (2; this one reads up to 1): upgrade trainchaos"
    refused(["validate", str(tmp_path / "new.yaml")], words, capsys)


@pytest.mark.parametrize("kind", [Results, ComparisonPlan, Comparison, GateResult])
def test_every_stored_model_of_a_newer_schema_is_refused(
    kind: type[Results | ComparisonPlan | Comparison | GateResult],
) -> None:
    """And for this reason alone, whatever else it holds."""
    with pytest.raises(NewerVersion, match=re.escape(NEWER.format(2, 1))):
        parse_model(b'{"schema_version": 2, "what": "is new"}', kind)
    with pytest.raises(ValueError) as missing:
        parse_model(b'{"schema_version": 1}', kind)
    assert "newer version" not in str(missing.value)
