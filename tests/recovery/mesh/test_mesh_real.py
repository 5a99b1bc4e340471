"""Jobs over a mesh, with real processes: a cell that is lost comes back, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.decided import decided, unpassed
from tests.support.running import ROOT, Running, kill
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.results import Results

pytestmark = pytest.mark.real

KILL = "process-kill"
SCENARIO = """
version: 1
name: mesh
seed: 5
workload: {{kind: gpt, size: nano, ranks: {ranks}, steps: 12, global_batch: 8, parallelism: {shape},
  checkpoint: {{every: 4, keep: 3}}}}
recovery: {strategy}
faults: [{{id: fault, kind: {kind}, target: {{rank: {rank}}},
  at: {{step: 7, phase: {at}}}, expect: {{blame: rank}}}}]
stop_conditions: [{{when: "no_committed_step_for > 60s"}}]
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "rank", "strategy", "kind", "at"),
    [
        ("{replicate: 2, tensor: 2}", 3, "hot-spare", KILL, "backward"),
        ("{replicate: 2, pipeline: 2}", 2, "checkpoint-restart", KILL, "backward"),
        pytest.param(
            # once the others have made all passes of the step
            *("{replicate: 2, pipeline: 2}", 2, "hot-spare", KILL, "collective"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("{replicate: 2, shard: 2, pipeline: 2}", 5, "hot-spare", KILL, "optimizer"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            # by its own answer: marks do not tell it where stages have collectives of their own
            *("{replicate: 2, pipeline: 2}", 1, "hot-spare", "collective-skip", "data"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("{replicate: 2, context: 2}", 3, "hot-spare", KILL, "backward"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("{context: 2, tensor: 2}", 2, "checkpoint-restart", KILL, "collective"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_lost_cell_changes_no_bit(
    tmp_path: Path, shape: str, rank: int, strategy: str, kind: str, at: str
) -> None:
    path = tmp_path / "mesh.yaml"
    ranks = 2 ** shape.count("2")
    path.write_text(
        SCENARIO.format(shape=shape, ranks=ranks, rank=rank, strategy=strategy, kind=kind, at=at)
    )
    code = decided(path, tmp_path / "runs")
    text = (tmp_path / "runs" / "mesh" / "latest" / "results.json").read_text()
    assert (unpassed(Results.model_validate_json(text)), code) == ({}, 0), text


SPARE, RESTART = ("hot-spare", "--spares", "1"), ("checkpoint-restart",)
LIVE = ("hot-spare", "--spares", "2", "--param", "sync=live")
STEPS = 96


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "mesh", "strategy"),
    [
        ("mesh_recoverable.py", "tensor=2", SPARE),
        ("mesh_recoverable.py", "tensor=2", LIVE),
        ("mesh_recoverable.py", "tensor=2", RESTART),
        ("context_recoverable.py", "context=2", SPARE),
    ],
    ids=str,
)
def test_an_example_ends_after_a_kill_as_without(
    tmp_path: Path, example: str, mesh: str, strategy: tuple[str, ...]
) -> None:
    """Which calls collectives of its own between the steps."""
    options = ("--ranks", "4", "--mesh", mesh, "--fresh", "--strategy", *strategy)
    ends = []
    for name in ("plain", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        job = Running(folder, *options, ROOT / "examples" / example, "3")
        try:
            if name == "killed":
                job.wait_for(lambda job=job: job.trained(30))  # type: ignore[misc]
                kill(job.pid_of("w2"))
            assert job.end() == 0, job.said
        finally:
            job.process.kill()
        logs = [path.stem for path in job.events.glob("[ws]*.jsonl")]
        digests = [event for log in logs for event in job.of(log, Kind.STATE_DIGEST)]
        ends.append({one.data["rank"]: one.data for one in digests if one.step == STEPS})
        generations = len(job.of("orchestrator", Kind.GENERATION_STARTED))
        assert generations == (1 if name == "plain" else 2)
    assert len(ends[0]) == 4 and ends[0] == ends[1]
    states = [event.data for log in logs for event in job.of(log, Kind.STATE_READY)]
    assert ("live" in {state["origin"] for state in states}) == (strategy is LIVE)
