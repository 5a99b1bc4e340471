"""A script with a data loader and elastic sums under real faults: it ends as if nothing
had been.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.decided import decided
from trainchaos.harness.judge.results import Results

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "loader_recoverable.py"
SCENARIO = f"""
version: 1
name: loader
seed: 5
workload:
  kind: script
  params: {{path: {SCRIPT}, args: ["2"]}}
  ranks: 4
  steps: 64
  global_batch: 32
  determinism: elastic
  checkpoint: {{every: 20}}
recovery: STRATEGY
faults:
  - {{id: data, kind: process-kill, target: {{rank: 2}}, at: {{step: 21, phase: data}}}}
  - {{id: backward, kind: process-kill, target: {{rank: 0}}, at: {{step: 43, phase: backward}}}}
sla:
  samples_lost: ["max <= 0"]
"""


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("drop-replica", marks=pytest.mark.long),
        pytest.param("hot-spare", marks=pytest.mark.long),
        pytest.param("checkpoint-restart", marks=pytest.mark.long),
    ],
)
def test_workers_deliver_what_is_due_and_the_result_is_the_same(
    tmp_path: Path, strategy: str
) -> None:
    path = tmp_path / "loader.yaml"
    path.write_text(SCENARIO.replace("STRATEGY", strategy))
    code = decided(path, tmp_path / "runs")
    results = Results.model_validate_json(
        (tmp_path / "runs/loader/latest/results.json").read_text()
    )
    assert code == 0, results.reason
    assert [cell.exactness for cell in results.cells] == ["bit for bit"]
    assert [fault.landed for fault in results.faults] == [True, True]
    if strategy == "drop-replica":
        worlds = {
            g for g in results.cells[0].invariants["membership"].witness.split() if g.isdigit()
        }
        assert {"3", "4"} <= worlds
