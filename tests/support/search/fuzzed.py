"""Shared by tests of ``chaos fuzz``: what a search draws, and a job for real plays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import CHECKED, is_mesh
from trainchaos.harness.fuzz.draw.text import as_yaml
from trainchaos.harness.fuzz.play.play import PlayResult, kinds, strategies
from trainchaos.harness.judge.results import Finding

LIMIT_S = 120
KILL = {
    "id": "f0",
    "kind": "process-kill",
    "at": {"step": 10, "phase": "backward"},
    "target": {"rank": 1},
}


def fails(witness: str) -> PlayResult:
    """A checker of the faulted arm says so."""
    return PlayResult(findings={"faulted: membership": Finding(verdict="fail", witness=witness)})


def tree_of(launcher: str, **more: Any) -> draw.Tree:
    """A small job with a kill in it."""
    workload = {
        "kind": "mlp",
        "ranks": 2,
        "steps": 30,
        "determinism": "default",
        "parallelism": "ddp",
        "global_batch": 4,
        "checkpoint": {"every": 6},
    }
    return {
        "version": 1,
        "name": "fuzz",
        "seed": 5,
        "launcher": {"kind": launcher, "nodes": 1},
        "workload": workload,
        "recovery": {"strategy": "hot-spare"},
        "faults": [KILL],
        "stop_conditions": [{"when": "no_committed_step_for > 60s"}],
        **more,
    }


def refusals(trees: Iterable[Mapping[str, Any]], folder: Path) -> list[str]:
    """What the loader says of those that it refuses."""
    refused, catalogue = [], build_catalogue()
    for number, tree in enumerate(trees):
        path = folder / f"{number}.yaml"
        path.write_text(as_yaml(tree))
        try:
            load(path, catalogue)
        except ScenarioError as error:
            refused.append(str(error))
    return refused


def assert_all_drawn(trees: Iterable[Mapping[str, Any]]) -> None:
    """Every kind, strategy, layout and trigger is in one of them."""
    trees = list(trees)
    faults = [fault for tree in trees for fault in tree["faults"]]
    assert {fault["kind"] for fault in faults} == set(kinds())
    assert {tree["recovery"]["strategy"] for tree in trees} == set(strategies()) - {"none"}
    shapes = [tree["workload"]["parallelism"] for tree in trees]
    adaptive = [tree["recovery"]["strategy"] == "adaptive" for tree in trees]
    assert any(is_mesh(shape) and one for shape, one in zip(shapes, adaptive, strict=True))
    assert {str(shape)[:6] for shape in shapes} == {"ddp", "fsdp", "{'hsdp", "{'shar"}
    for dim in ("shard", "pipeline", "context", "tensor", "replicate"):
        assert any(shape[dim] > 1 for shape in shapes if is_mesh(shape)), dim
    meshes = [shape for shape in shapes if is_mesh(shape)]
    for pair in (("shard", "pipeline"), ("context", "pipeline"), ("context", "tensor")):
        assert any(all(shape[dim] > 1 for dim in pair) for shape in meshes), pair
    checked = [tree for tree in trees if "health" in tree]
    assert len(checked) < len(trees) / 2
    assert any(fault["at"].get("event") == CHECKED for tree in checked for fault in tree["faults"])
    assert {key for fault in faults for key in fault["at"]} >= {
        "step",
        "steps",
        "from",
        "time",
        "event",
        "mtbf",
        "weibull",
        "phase",
        "probability",
    }
