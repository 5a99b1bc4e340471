"""Simulated arms in which a health source warns: what a warning saves, and how it is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.simulate import cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import CHECKERS, check

FAILS = {"id": "f", "kind": "gpu-error", "at": {"step": 38}, "target": {"rank": 1}}


def warning(code: int = 48, **more: Any) -> dict[str, Any]:
    """A driver's report on rank 1 in step 31."""
    fault = {
        "id": "w",
        "kind": "health-event",
        "at": {"step": 31},
        "target": {"rank": 1},
        "params": {"what": "xid", "code": code},
    }
    return {**fault, **more}


def restored(played: Any) -> int:
    """The step that the last recovery went back to."""
    return int(list(played.log.of(Kind.GENERATION_READY))[-1].data["resume_step"])


def test_a_warning_saves_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    lost = {}
    for name, faults in {"warned": [warning(), FAILS], "not": [FAILS]}.items():
        cell = cell_of("checkpoint-restart", faults, ranks=2, every=25)
        lost[name] = 37 - restored(play(cell, tmp_path / name, seed=3))
    assert lost["not"] == 12 and lost["warned"] <= 37 - 31, lost


@pytest.mark.parametrize("strategy", ["hot-spare", "drop-replica", "checkpoint-restart"])
def test_nothing_is_lost_where_nothing_fails_after_all(tmp_path: Path, strategy: str) -> None:
    played = play(cell_of(strategy, [warning()], ranks=2), tmp_path, seed=3)
    judged = replace(evidence(played, None), arm="faulted")
    found = {name: check(checker, judged) for name, checker in CHECKERS.items()}
    assert not {name: one for name, one in found.items() if one.verdict == "fail"}
    (incident,) = judged.measures.incidents
    assert (incident.outcome, incident.detected_by) == ("recovered", "warning")
    assert (incident.steps_lost, incident.blamed_rank) == (0, 1)
    moved = strategy == "hot-spare"
    ends = [e.data for e in played.log.of(Kind.PROCESS_EXITED) if e.data["process"] == "w1"]
    assert ends[0]["signal"] == (9 if moved else None)


@pytest.mark.parametrize("code", [94, 13])
def test_a_report_that_announces_nothing_moves_nobody(tmp_path: Path, code: int) -> None:
    played = play(cell_of("hot-spare", [warning(code)], ranks=2), tmp_path, seed=3)
    assert played.log.first(Kind.FAILURE_DETECTED) is None
    assert len(list(played.log.of(Kind.GENERATION_STARTED))) == 1


def test_a_warning_of_a_node_is_one_of_all_its_ranks(tmp_path: Path) -> None:
    faults = [warning(target={"node": 1})]
    spares = {"strategy": "hot-spare", "spares": 2}
    cell = cell_of(spares, faults, ranks=4, launcher={"kind": "sim", "nodes": 3})
    played = play(cell, tmp_path, seed=3)
    told = [e.data for e in played.log.of(Kind.FAILURE_DETECTED)]
    assert [(one["cause"], one["rank"]) for one in told] == [("warning", 2), ("warning", 3)]
    found = check(CHECKERS["detection"], replace(evidence(played, None), arm="faulted"))
    assert found.verdict == "pass", found
    assert len(list(played.log.of(Kind.GENERATION_STARTED))) == 2, "both moved at once"
    later = [
        e.data["node"]
        for e in played.log.of(Kind.PROCESS_SPAWNED)
        if e.time_ns > next(iter(played.log.of(Kind.FAILURE_DETECTED))).time_ns
    ]
    assert later and 1 not in later, "no process is started there"


def test_where_all_places_fail_a_checkpoint_is_saved_and_nobody_moves(tmp_path: Path) -> None:
    played = play(cell_of("hot-spare", [warning(target={"node": 0})], ranks=2), tmp_path, seed=3)
    decided = [e.data["reason"] for e in played.log.of(Kind.DECISION)]
    assert any("a checkpoint is saved before" in reason for reason in decided)
    assert not any("in place of" in reason for reason in decided), decided
    spares = [e for e in played.log.of(Kind.PROCESS_SPAWNED) if e.data["role"] == "spare"]
    assert len(spares) <= 2, "it is replaced once, and then kept"
    assert played.outcome == "completed"


def test_a_warning_while_nobody_supervises_is_not_lost(tmp_path: Path) -> None:
    faults = [{"id": "c", "kind": "coordinator-kill", "at": {"step": 30}}, warning()]
    played = play(cell_of("hot-spare", faults, ranks=2), tmp_path, seed=3)
    causes = [e.data["cause"] for e in played.log.of(Kind.FAILURE_DETECTED)]
    assert causes == ["warning"]
    judged = replace(evidence(played, None), arm="faulted")
    found = {name: check(checker, judged) for name, checker in CHECKERS.items()}
    assert not {name: one for name, one in found.items() if one.verdict == "fail"}
