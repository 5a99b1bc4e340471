"""The examples of examples/torchtitan, for real: torchtitan's debug model under recovery, cut up by
its own functions, and its own trainer under torchrun.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.integrations.heard import need
from tests.chaos.integrations.test_examples import ROOT, play, this_python_first

__all__ = ["this_python_first"]

FOLDER = ROOT / "examples" / "torchtitan"
STAGES = "examples/torchtitan/pipeline_recoverable.py"

pytestmark = [pytest.mark.real, pytest.mark.frameworks, pytest.mark.timeout(900)]


def alone(strategy: str) -> tuple[str, ...]:
    """Options for one of the strategies."""
    return "--set", "matrix={}", "--set", f"recovery={strategy}"


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ("hot-spare", "{replicate: 2, tensor: 2}"),
        pytest.param("hot-spare", "{replicate: 2, shard: 2}", marks=pytest.mark.long),
        pytest.param("hot-spare", "{replicate: 2, pipeline: 2}", marks=pytest.mark.long),
        pytest.param("drop-replica", "{replicate: 2, tensor: 2}", marks=pytest.mark.long),
        pytest.param("checkpoint-restart", "{replicate: 2, tensor: 2}", marks=pytest.mark.long),
    ],
)
def test_the_debug_model_recovers_on_a_mesh(strategy: str, shape: str, tmp_path: Path) -> None:
    need("torchtitan")
    shaped = ("--set", f"workload.parallelism={shape}")
    if "pipeline" in shape:
        shaped = (*shaped, "--set", "workload.params.path=" + STAGES)
    results, _ = play(FOLDER / "recoverable.yaml", tmp_path, *alone(strategy), *shaped)
    (incident,) = results.faults
    assert (incident.outcome, incident.blamed_rank) == ("recovered", 3)
    (cell,) = results.cells
    assert cell.verdict == "pass"  # with the digests of the arm without the fault


def test_its_own_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    need("torchtitan")
    results, reports = play(FOLDER / "blackbox.yaml", tmp_path, "--set", "baseline=none")
    (incident,) = results.faults
    assert (incident.outcome, incident.blamed_rank) == ("recovered", 1)
    assert incident.restored_step == 20
    assert [e.step for e in reports if e.data["rank"] == 0][-10:] == list(range(21, 31))
