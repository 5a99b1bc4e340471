"""Whom a non-finite step is blamed on: nobody, where what was sent was finite and only the norm over all is not."""

from __future__ import annotations

from typing import Any

import arms
import pytest
from arms import CLEAN, FAIL, evidence_of, red
from fuzzed import tree_of

from chaos.cli import build_catalogue
from chaos.events import Kind
from harness.fuzz.oracle import find_in
from harness.fuzz.play import Player


@pytest.mark.parametrize(
    ("written", "verdict"), [(["1.5e+38"], None), (["1.5e+38", "nan"], FAIL), (None, FAIL)]
)
def test_nobody_is_to_blame_for_a_value_that_was_finite(
    written: list[str] | None, verdict: str | None
) -> None:
    script = arms.nan()
    evidence: dict[str, Any] = {"surface": "gradient", "op": "bitflip", "before": "aa", "after": "bb"}
    script.edit(Kind.FAULT_LANDED, {"evidence": evidence | ({"new": written} if written else {})})
    script.edit(Kind.FAILURE_DETECTED, {"process": None, "rank": None})
    assert red(evidence_of(script, CLEAN["nan"][1])).get("detection") == verdict


def test_somebody_else_is_not_to_blame_for_it_either() -> None:
    script = arms.nan()
    evidence = {"surface": "gradient", "op": "bitflip", "before": "aa", "after": "bb", "new": ["1.5e+38"]}
    script.edit(Kind.FAULT_LANDED, {"evidence": evidence})
    script.edit(Kind.FAILURE_DETECTED, {"process": "w1", "rank": 1})
    assert red(evidence_of(script, CLEAN["nan"][1]))["detection"] == FAIL


@pytest.mark.parametrize(("op", "blamed"), [("bitflip", None), ("nan", "w1")])
def test_simulated_ranks_say_so_as_real_ones_do(op: str, blamed: str | None) -> None:
    fault = {
        "id": "f0",
        "kind": "tensor-corrupt",
        "at": {"step": 16},
        "params": {"op": op},
        "target": {"rank": 1},
    }
    tree = tree_of("sim", faults=[fault])
    played = Player(catalogue=build_catalogue()).play(tree)
    (failure,) = played.logs["faulted"].of(Kind.FAILURE_DETECTED)
    assert (failure.data["cause"], failure.data["process"]) == ("nonfinite", blamed)
    assert find_in(tree, played) is None


def test_a_fault_that_found_nobody_explains_no_failure_and_ends_no_other() -> None:
    kill_all = {"id": "f0", "kind": "node-kill", "at": {"step": 14}}
    late = {"id": "f1", "kind": "process-kill", "at": {"event": "recovery_started"}, "target": {"rank": 0}}
    tree = tree_of("sim", faults=[kill_all, late], recovery={"strategy": "drop-replica"})
    played = Player(catalogue=build_catalogue()).play(tree)
    (failed,) = played.logs["faulted"].of(Kind.FAULT_FAILED)
    assert failed.data["reason"] == "nobody holds rank 0"
    assert find_in(tree, played) is None, find_in(tree, played)
