"""Sharded training, broken and recovered for real: every layout with every strategy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.decided import decided, unpassed
from tests.support.running import LIMIT_S, ROOT, supervised
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.results import Results

pytestmark = pytest.mark.real

STEPS = 30
LOST_AT = 12

SCENARIO = """
version: 1
name: sharded
seed: 5
workload: {{kind: {kind}, ranks: 4, steps: {steps}, global_batch: 12, parallelism: {parallelism},
  checkpoint: {{every: 4, keep: 3}}}}
recovery: ${{matrix.recovery}}
faults: [{{id: kill, kind: process-kill,
  target: {{rank: {rank}}}, at: {{step: 6, phase: {phase}}}}}]
stop_conditions: [{{when: "no_committed_step_for > 60s"}}]
matrix: {{recovery: [checkpoint-restart, drop-replica, hot-spare]}}
"""

HYBRID = "{hsdp: {replicas: 2, shards: 2}}"


def run(tmp_path: Path, **words: object) -> Results:
    """Run a scenario in this process; the stored results."""
    path = tmp_path / "sharded.yaml"
    path.write_text(SCENARIO.format(**words))
    code = decided(path, tmp_path / "runs")
    results = (tmp_path / "runs" / "sharded" / "latest" / "results.json").read_text()
    assert (unpassed(Results.model_validate_json(results)), code) == ({}, 0), results
    return Results.model_validate_json(results)


def restored(tmp_path: Path, strategy: str) -> list[str]:
    """Where the state of a strategy's generations came from, the first left out."""
    (arm,) = (tmp_path / "runs" / "sharded" / "latest" / "events").glob(f"*{strategy}*faulted")
    started = [
        e
        for e in EventLogTail(arm / "orchestrator.jsonl").read()
        if e.kind is Kind.GENERATION_STARTED
    ]
    return [e.data["state"] for e in started[1:]]


@pytest.mark.parametrize(
    ("kind", "steps", "rank", "phase"),
    [
        pytest.param("gpt", 24, 1, "backward", marks=pytest.mark.long),
        pytest.param("mlp", 40, 2, "forward", marks=pytest.mark.long),
    ],
)
def test_a_replica_that_loses_a_rank_is_filled_dropped_or_restored(
    tmp_path: Path, kind: str, steps: int, rank: int, phase: str
) -> None:
    results = run(tmp_path, kind=kind, steps=steps, rank=rank, phase=phase, parallelism=HYBRID)
    cells = {cell.params["recovery"]: cell for cell in results.cells}
    assert set(cells) == {"checkpoint-restart", "drop-replica", "hot-spare"}
    assert restored(tmp_path, "hot-spare") == ["peer"]
    assert restored(tmp_path, "drop-replica") == ["peer", "peer"], "two go on, then four again"
    assert restored(tmp_path, "checkpoint-restart") == ["checkpoint"]


@pytest.mark.long
def test_the_only_copy_of_a_shard_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    results = run(tmp_path, kind="gpt", steps=24, rank=1, phase="collective", parallelism="fsdp")
    assert len(results.cells) == 3
    for strategy in ("checkpoint-restart", "drop-replica", "hot-spare"):
        assert restored(tmp_path, strategy) == ["checkpoint"]


SCRIPT = f"""
import os, signal, sys, threading, torch
from trainchaos import recovery
from trainchaos.recovery.collectives.group import GenerationLost

job = recovery.join(samples=64, steps={STEPS}, global_batch=8, seed=3, checkpoint_dir="checkpoints",
                    checkpoint_every=100)
torch.manual_seed(job.seed)
model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
job.attach(
    model, lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
    clip_norm=0.5, units=[model[0]],
)
last_word, pause = job.reducer._last_word, threading.Event()

def lose(*arguments):
    word = last_word(*arguments)
    interrupted = job.generation == 1 and job.state.step == {LOST_AT} - 1
    if len(sys.argv) > 1 and interrupted and job.rank != 1:
        while not os.path.exists("applied"):
            pause.wait(0.002)
            job.check()
        if job.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        raise GenerationLost("as the test wants it")
    return word

job.reducer._last_word = lose
while job.running():
    with job.step() as step:
        x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in step.samples])
        step.backward(model(x).square().sum())
        step.commit()
        if job.rank == 1 and step.number == {LOST_AT}:
            open("applied", "x").close()
"""


def supervise(folder: Path, *arguments: str) -> dict[str, list[Event]]:
    """Run the script under ``recovery.run`` with two replicas of two shards; events by process."""
    return supervised(folder, SCRIPT, "--ranks", "4", "--shards", "2", arguments=arguments)


def last_digests(events: dict[str, list[Event]]) -> dict[int, dict[str, object]]:
    """Of each rank's part of the state after the last step."""
    found = [
        e for log in events.values() for e in log if e.kind is Kind.STATE_DIGEST and e.step == STEPS
    ]
    digests: dict[int, dict[str, object]] = {}
    for event in found:
        rank = int(event.data["rank"])
        assert rank not in digests
        digests[rank] = {name: value for name, value in event.data.items() if name != "rank"}
    return digests


@pytest.mark.long
def test_a_rank_that_dies_while_only_one_has_applied_the_step_changes_no_bit(
    tmp_path: Path,
) -> None:
    """Both holders of shard 0 lack the last word of the step, one of shard 1 has applied it, the
    other dies.
    """
    whole, broken = supervise(tmp_path / "whole"), supervise(tmp_path / "broken", "lose")
    digests = last_digests(whole)
    assert set(digests) == {0, 1, 2, 3}
    assert digests[0] == digests[2] != digests[1] == digests[3]
    assert last_digests(broken) == digests
    supervisor = broken["orchestrator"]
    (ready,) = [e for e in supervisor if e.kind is Kind.GENERATION_READY and e.generation == 2]
    assert (ready.data["resume_step"], len(ready.data["members"])) == (
        LOST_AT,
        4,
    ), "nothing is computed twice"
    parked = {name: e.step for name, log in broken.items() for e in log if e.kind is Kind.PARKED}
    assert parked == {"w0": LOST_AT - 1, "w1": LOST_AT, "w2": LOST_AT - 1}
    late = [
        e
        for name in ("w0", "w2")
        for e in broken[name]
        if e.kind is Kind.STEP_COMMITTED and e.step == LOST_AT
    ]
    assert len(late) == 2


def test_shards_that_do_not_make_replicas_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "trainchaos.recovery.run",
            "--ranks",
            "3",
            "--shards",
            "2",
            str(script),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 2
    assert "3 ranks do not make copies of 2 shards: use a multiple of 2" in ran.stderr
