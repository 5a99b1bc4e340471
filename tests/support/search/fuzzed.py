"""What tests of ``chaos fuzz --real`` share: a job and what may become of it."""

from __future__ import annotations

from typing import Any

from harness.fuzz.draw import draw
from harness.fuzz.play.play import PlayResult
from harness.judge.results import Finding

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
