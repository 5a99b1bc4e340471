"""The examples of examples/frameworks, for real: each is killed in the middle of a step, goes on
from its checkpoint, and passes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.integrations.heard import need
from tests.support.decided import decided
from trainchaos.chaos.events.log import Event, Kind, read_log
from trainchaos.harness.judge.results import Results

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "frameworks"
NAN = (
    "faults=[{id: nan, kind: tensor-corrupt, target: {rank: 1}, at: {step: 25},"
    " expect: {outcome: sdc-escape}}]"
)
ALONE = ("--set", "baseline=none")
"""Without the arm that has no fault: half the time."""
TORCH = ("plain", "spawn")
"""Examples that need PyTorch only."""
FRAMEWORKS = {
    "lightning": "lightning",
    "hf": "transformers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
}

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def this_python_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """``python`` and ``torchrun`` of a scenario are those that run the tests."""
    own = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join([own, os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


def play(scenario: Path, runs: Path, *options: str) -> tuple[Results, Sequence[Event]]:
    """The results, and the steps that were reported in the faulted arm."""
    code = decided(scenario, runs, ("--quiet", *options))
    (latest,) = runs.glob("*/latest")
    results = Results.model_validate_json((latest / "results.json").read_text())
    output = "\n".join(path.read_text()[-2000:] for path in latest.glob("logs/*/output.log"))
    assert code == 0, f"{results.reason}\n{output}"
    log = read_log(latest / "events" / "default.r0.faulted")
    return results, list(log.of(Kind.STEP_REPORTED))


def passes(name: str, runs: Path, *options: str) -> None:
    """Every step of both ranks was reported, with a loss; rank 1 was killed in step 25, or later on
    a busy machine, blamed, and the job went on after the checkpoint of step 20.
    """
    results, reports = play(FOLDER / f"{name}.yaml", runs, *options)
    (incident,) = results.faults
    assert (incident.outcome, incident.blamed_rank) == ("recovered", 1)
    assert incident.restored_step == 20
    done = set[int]()
    for rank in (0, 1):
        own = [event for event in reports if event.data["rank"] == rank]
        begins = next(n for n, e in enumerate(own) if n and (e.step or 0) <= (own[n - 1].step or 0))
        steps = [event.step for event in own]
        assert steps[begins:] == list(range(21, 41)), (rank, steps)
        assert steps[:begins] == list(range(1, begins + 1)), (rank, steps)
        done.add(begins)
    assert incident.steps_lost == max(done) - 20 and min(done) >= 24
    assert {event.data["rank"] for event in reports} == {0, 1}
    losses = [event.data["loss"] for event in reports]
    assert all(isinstance(loss, float) and 0 < loss < 10 for loss in losses)
    assert all(event.data["samples"] for event in reports)


def test_every_scenario_of_the_folder_is_played_here() -> None:
    names = [path.stem for path in FOLDER.glob("*.yaml")]
    assert sorted(names) == sorted([*TORCH, *FRAMEWORKS])


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "spawn"])
def test_a_loop_of_pytorch_alone_passes(name: str, tmp_path: Path) -> None:
    passes(name, tmp_path, *ALONE)


@pytest.mark.frameworks
@pytest.mark.parametrize("name", [pytest.param("lightning", marks=pytest.mark.smoke), "hf"])
def test_a_framework_passes(name: str, tmp_path: Path) -> None:
    need(FRAMEWORKS[name])
    passes(name, tmp_path)


@pytest.mark.frameworks
def test_accelerate_passes(tmp_path: Path) -> None:
    need("accelerate")
    passes("accelerate", tmp_path, *ALONE)


@pytest.mark.frameworks
@pytest.mark.long  # compiles for more than a minute where it has never run
def test_deepspeed_passes(tmp_path: Path) -> None:
    need("deepspeed")
    passes("deepspeed", tmp_path, *ALONE)


@pytest.mark.frameworks
def test_nan_in_gradients_of_one_rank_reaches_the_other(tmp_path: Path) -> None:
    need("lightning")
    options = [word for text in (NAN, "sla={}") for word in ("--set", text)]
    results, reports = play(FOLDER / "lightning.yaml", tmp_path, *options)
    (incident,) = results.faults
    assert (incident.outcome, incident.witness) == ("sdc-escape", "script: its own word")
    losses = {step: {e.data["loss"] for e in reports if e.step == step} for step in (24, 26)}
    assert losses[26] == {"nan"} and "nan" not in losses[24]
