"""Stored runs compared: strategies of one run, two versions of one, and what is not alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands.unreported import unreported
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import NoRun, ScenarioError
from trainchaos.harness.compare.result.model import Comparison
from trainchaos.harness.compare.stored import compare_stored
from trainchaos.harness.gating.baseline import load

SCENARIO = """version: 1
name: stored
launcher: sim
workload: {{kind: mlp, ranks: 4, steps: {steps}, global_batch: 24, checkpoint: {{every: 10}}}}
recovery: ${{matrix.recovery}}
faults: [{faults}]
matrix: {{recovery: [{recoveries}]}}
repeat: 2
"""
KILL = "{id: kill, kind: process-kill, target: {rank: 2}, at: {step: 13, phase: backward}}"


def run(
    place: Path,
    name: str,
    *,
    steps: int = 20,
    faults: str = KILL,
    recoveries: str = "hot-spare, checkpoint-restart",
    seed: int = 5,
) -> Path:
    """A simulated run, and its directory."""
    path = place / "scenario.yaml"
    path.write_text(SCENARIO.format(steps=steps, faults=faults, recoveries=recoveries))
    unreported(["run", str(path), "--runs", str(place / name), "--seed", str(seed), "-q"])
    return (place / name / "stored" / "latest").resolve()


def compared(*paths: Path) -> Comparison:
    """Their comparison."""
    return compare_stored(paths, name="x", argv=["compare"], price=None, currency="USD")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of two strategies."""
    return run(tmp_path_factory.mktemp("first"), "runs")


@pytest.mark.slow
def test_the_strategies_of_one_run_are_set_against_each_other(first: Path) -> None:
    made = compared(first)
    assert [stack.label for stack in made.stacks] == ["hot-spare", "checkpoint-restart"]
    assert made.families == {"process-kill": "process-kill"}
    cells = {cell.label: cell for cell in made.cells}
    assert cells["hot-spare"].worst == "recovered"
    assert cells["checkpoint-restart"].worst == "rolled back"
    assert cells["hot-spare"].n == 2
    (ratio,) = [ratio for ratio in made.ratios if ratio.metric == "recovery"]
    assert ratio.n == 2 and ratio.value is not None and ratio.value > 1
    assert all(trial.phases and trial.goodput for trial in made.trials)
    assert not made.cautions
    assert Comparison.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize("arm", ["faulted", "control"])
def test_a_record_that_cannot_be_counts_for_nothing(first: Path, tmp_path: Path, arm: str) -> None:
    path = tmp_path / "run"
    shutil.copytree(first, path)
    (log,) = path.glob(f"events/*hot-spare*r0.{arm}/orchestrator.jsonl")
    log.write_text(log.read_text().replace('"repeat":0', '"repeat":1', 1))
    (path / "seal.json").unlink()
    made = compared(path)
    (trial,) = [one for one in made.trials if "identity" in one.witness + one.note]
    assert trial.label == "hot-spare" and (trial.outcome == "refuted") == (arm == "faulted")
    assert (trial.control_goodput is None, trial.recovery is None) == (True, arm == "faulted")
    assert len(made.cautions) == 1 and "identity: the log says repeat 1" in made.cautions[0]


@pytest.mark.slow
def test_two_versions_of_one_strategy_are_told_apart(first: Path, tmp_path: Path) -> None:
    second = run(tmp_path, "runs", recoveries="hot-spare")
    facts = json.loads((second / "system.json").read_text())
    facts["versions"]["torch"] = "0.1"
    (second / "system.json").write_text(json.dumps(facts))
    (second / "seal.json").unlink()
    made = compared(first, second)
    labels = [stack.label for stack in made.stacks]
    assert len(set(labels)) == 3 and labels[1] == "checkpoint-restart"
    assert labels[0].startswith(f"hot-spare {first.name}") and labels[2].startswith(
        f"hot-spare {second.name}"
    )
    twin = next(r for r in made.ratios if r.label == labels[2] and r.metric == "recovery")
    assert (twin.n, twin.says) == (2, "too few")
    assert twin.value == pytest.approx(1), "a simulation repeats itself"
    assert any("differ in versions" in caution for caution in made.cautions)


@pytest.mark.slow
def test_what_is_not_alike_is_said(first: Path, tmp_path: Path) -> None:
    other = run(tmp_path, "runs", steps=24, seed=9, recoveries="hot-spare")
    cautions = " ".join(compared(first, other).cautions)
    assert "do not train the same: steps is 24 and 20" in cautions
    assert "no seed in common" in cautions


@pytest.mark.slow
def test_what_is_no_run_or_holds_no_fault_is_an_error(first: Path, tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="is not a run directory"):
        compared(tmp_path)
    control = run(tmp_path, "runs", faults="", recoveries="hot-spare")
    with pytest.raises(ScenarioError, match="no faulted arm"):
        compared(control)


@pytest.mark.parametrize("text", ["", "edited"])
def test_what_results_json_says_is_not_believed(first: Path, tmp_path: Path, text: str) -> None:
    edited = Path(shutil.copytree(first, tmp_path / "runs" / first.name))
    said = (edited / "results.json").read_text()
    other = said.replace('"completed"', '"interrupted"').replace('"sim: ', '"none: ')
    assert other != said
    (edited / "results.json").write_text(other if text else "")
    made, true = compared(edited), compared(first)
    assert [trial.recovery for trial in made.trials] == [trial.recovery for trial in true.trials]
    assert (made.cells, made.fidelity) == (true.cells, true.fidelity)
    saved = []
    for run in (first, edited):
        assert invoke(["baseline", "save", str(run), "-o", str(tmp_path / "b.json")]) == 0
        saved.append(load(tmp_path / "b.json"))
    assert saved[0] == saved[1]
