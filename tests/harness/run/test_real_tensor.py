"""Tensor and data faults in real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.run.test_real import GPT, MLP, run
from tests.harness.run.test_real_storage import events, passes
from tests.support.decided import decided
from trainchaos.chaos.events.log import Kind

pytestmark = pytest.mark.real

SILENT = [
    ("bitflip", "parameter", ", bit: 20"),
    ("scale", "activation", ", factor: 3, count: 50"),
    ("zero", "gradient", ", count: 200"),
    ("stale", "input", ", count: 50"),
    ("stale", "parameter", ", count: 50"),
    ("bitflip", "rng", ", bit: 3"),
    ("stale", "rng", ""),
    ("stale", "loss", ""),
    ("scale", "optimizer_state", ", factor: 2, count: 50"),
    ("stale", "gradient", ", count: 50"),
]


BLIND = MLP.replace("ranks: 4", "ranks: 4, verify_every: 0")  # replicas do not compare their states


def corrupt(number: int, op: str, surface: str, more: str = "") -> str:
    """One fault of several, each in a step of its own."""
    return (
        f"{{id: f{number}, kind: tensor-corrupt, params: {{surface: {surface}, op: {op}{more}}}, "
        f"target: {{rank: {number % 4}}}, at: {{step: {10 + 4 * number}}}}}"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(MLP, id="mlp"),
        pytest.param(GPT.replace("steps: 36", "steps: 60"), id="gpt", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "surface",
    [
        "activation",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("input", "optimizer_state")),
    ],
)
def test_what_is_not_finite_is_caught_blamed_and_contained(
    tmp_path: Path, workload: str, surface: str
) -> None:
    code, results = run(
        tmp_path, workload=workload, recovery="hot-spare", faults=f"[{corrupt(1, 'nan', surface)}]"
    )
    passes(code, results)
    (incident,) = results.faults
    assert (incident.detected_by, incident.blamed_rank, incident.outcome) == (
        "nonfinite",
        1,
        "recovered",
    )
    assert [cell.exactness for cell in results.cells] == ["bit for bit"]


@pytest.mark.parametrize(
    ("recovery", "fault"),
    [
        ("hot-spare", "{id: f, kind: replica-desync, target: {rank: 0}, at: {step: 22}}"),
        *(
            pytest.param(
                recovery,
                "{id: f, kind: tensor-corrupt, params: {surface: SURFACE, op: bitflip, bit: 3}, "
                "target: {rank: 2}, at: {step: 22}}".replace("SURFACE", surface),
                marks=pytest.mark.long,
            )
            for recovery in ("checkpoint-restart", "drop-replica", "hot-spare")
            for surface in ("parameter", "optimizer_state")
        ),
    ],
)
@pytest.mark.long
def test_a_replica_that_differs_is_named_and_gets_the_others_state(
    tmp_path: Path, recovery: str, fault: str
) -> None:
    code, results = run(tmp_path, workload=MLP, recovery=recovery, faults=f"[{fault}]")
    passes(code, results)
    (incident,) = results.faults
    rank = 0 if "desync" in fault else 2
    assert (incident.detected_by, incident.blamed_rank, incident.outcome) == (
        "diverged",
        rank,
        "recovered",
    )
    digests = events(tmp_path, Kind.STATE_DIGEST)
    last = max(event.step or 0 for event in digests)
    held = [(e.data["parameters"], e.data["optimizer"]) for e in digests if e.step == last]
    assert len(held) == 4 and len(set(held)) == 1


@pytest.mark.long
def test_every_silent_corruption_lands_and_nobody_notices(tmp_path: Path) -> None:
    faults = ", ".join(
        corrupt(n, op, surface, more) for n, (op, surface, more) in enumerate(SILENT)
    )
    _, results = run(tmp_path, workload=BLIND, recovery="hot-spare", faults=f"[{faults}]")
    seen = {incident.fault: (incident.landed, incident.healed) for incident in results.faults}
    assert seen == {f"f{n}": (True, True) for n in range(len(SILENT))}
    assert not events(tmp_path, Kind.FAILURE_DETECTED)
    (cell,) = results.cells
    assert cell.exactness == "differs"


@pytest.mark.long
def test_a_drifting_replica_and_wrong_data_show_where_they_should(tmp_path: Path) -> None:
    drift = "{id: drift, kind: replica-desync, target: {rank: 1}, at: {step: 25}}"
    code, results = run(tmp_path, workload=BLIND, recovery="hot-spare", faults=f"[{drift}]")
    assert code == 1
    red = {name for name, f in results.cells[0].invariants.items() if f.verdict == "fail"}
    assert red == {"replica-equality", "loss-equality"}
    (tmp_path / "data").mkdir()
    wrong = "{id: wrong, kind: data-corrupt, target: {rank: 1}, at: {step: 25}}"
    code, results = run(tmp_path / "data", workload=MLP, recovery="hot-spare", faults=f"[{wrong}]")
    assert code == 1
    red = {name for name, f in results.cells[0].invariants.items() if f.verdict == "fail"}
    assert red == {"loss-equality"}


@pytest.mark.parametrize(
    "recovery",
    [
        "hot-spare",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("checkpoint-restart", "drop-replica")
        ),
    ],
)
@pytest.mark.long
def test_a_sample_that_nobody_can_compute_is_left_out(tmp_path: Path, recovery: str) -> None:
    # Two epochs and a half, so that it would come up again.
    workload = MLP.replace("ranks: 4", "ranks: 4, params: {samples: 400}")
    poison = "[{id: p, kind: poison-sample, target: {select: all}, at: {step: 20}}]"
    code, results = run(tmp_path, workload=workload, recovery=recovery, faults=poison)
    passes(code, results)
    (skipped,) = events(tmp_path, Kind.SAMPLES_SKIPPED)
    assert len(skipped.data["samples"]) == 1
    metrics = results.cells[0].metrics
    assert metrics["samples_lost"].max == 0
    assert metrics["samples_skipped"].max in (1, 2)
    assert len({event.generation for event in events(tmp_path, Kind.NONFINITE_CAUGHT)}) == 2


SPREAD: dict[str, tuple[int, Any]] = {
    "ddp": (2, "ddp"),
    "fsdp": (2, "fsdp"),
    "hsdp": (4, {"hsdp": {"replicas": 2, "shards": 2}}),
    "pipeline": (2, {"replicate": 1, "pipeline": 2}),
    "tensor": (2, {"replicate": 1, "tensor": 2}),
    "pipelines": (4, {"replicate": 2, "pipeline": 2}),
}


def ended(folder: Path, scenario: dict[str, Any], launcher: str) -> tuple[Any, ...]:
    """Exit status, and how the job and its incident ended."""
    folder.mkdir()
    (folder / "nan.yaml").write_text(json.dumps(scenario | {"launcher": launcher}))
    code = decided(folder / "nan.yaml", folder / "runs")
    said = json.loads((folder / "runs" / "nan" / "latest" / "results.json").read_text())
    cell = said["cells"][0]  # of drop-replica another one plays it with elastic sums
    (incident,) = [one for one in said["faults"] if one["cell"] == cell["id"]]
    left_out = cell["metrics"]["samples_lost"]["values"]
    return code, incident["outcome"], incident["detected_by"], incident["steps_lost"], left_out


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["hot-spare", "drop-replica"])
@pytest.mark.parametrize("nonfinite", ["retry", "skip", "rollback"])
@pytest.mark.parametrize("spread", SPREAD)
def test_real_and_simulated_ranks_end_alike(
    spread: str, nonfinite: str, strategy: str, tmp_path: Path
) -> None:
    """A value that is not finite, whatever is to be done about it and however the model is
    spread.
    """
    ranks, parallelism = SPREAD[spread]
    scenario = {
        "version": 1,
        "name": "nan",
        "seed": 3,
        "workload": {
            "kind": "gpt",
            "ranks": ranks,
            "steps": 40,
            "global_batch": 8,
            "checkpoint": {"every": 10},
            "parallelism": parallelism,
        },
        "recovery": {"strategy": strategy, "nonfinite": nonfinite},
        "faults": [
            {
                "id": "nan",
                "kind": "tensor-corrupt",
                "params": {"surface": "gradient", "op": "nan"},
                "target": {"rank": 1},
                "at": {"step": 23},
            }
        ],
        "stop_conditions": [{"when": "no_committed_step_for > 60s"}],
    }
    real = ended(tmp_path / "real", scenario, "local")
    assert real == ended(tmp_path / "simulated", scenario, "sim") and real[0] == 0
