"""Jobs over a mesh, with real processes: a cell that is lost comes back, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.harness.judge.results import Results

pytestmark = pytest.mark.real

SCENARIO = """
version: 1
name: mesh
seed: 5
workload: {{kind: gpt, size: nano, ranks: 4, steps: 12, global_batch: 8, parallelism: {shape},
  checkpoint: {{every: 4, keep: 3}}}}
recovery: {strategy}
faults: [{{id: kill, kind: process-kill, target: {{rank: {rank}}},
  at: {{step: 7, phase: backward}}}}]
stop_conditions: [{{when: "no_committed_step_for > 60s"}}]
"""


@pytest.mark.parametrize(
    ("shape", "rank", "strategy"),
    [
        ("{replicate: 2, tensor: 2}", 3, "hot-spare"),
        ("{replicate: 2, pipeline: 2}", 2, "checkpoint-restart"),
    ],
)
def test_a_lost_cell_changes_no_bit(tmp_path: Path, shape: str, rank: int, strategy: str) -> None:
    path = tmp_path / "mesh.yaml"
    path.write_text(SCENARIO.format(shape=shape, rank=rank, strategy=strategy))
    code = invoke(["run", str(path), "--runs", str(tmp_path / "runs"), "-q"])
    text = (tmp_path / "runs" / "mesh" / "latest" / "results.json").read_text()
    assert code == 0, text
    (cell,) = Results.model_validate_json(text).cells
    assert cell.verdict == "pass"
