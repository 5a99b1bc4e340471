"""Simulated arms in which a health source warns: what a warning saves, and how it is judged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.simulate import cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers import CHECKERS, check
from trainchaos.harness.judge.evidence.evidence import Evidence
from trainchaos.harness.judge.results import Finding

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


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", ["hot-spare", "drop-replica", "checkpoint-restart"])
def test_nothing_is_lost_where_nothing_fails_after_all(tmp_path: Path, strategy: str) -> None:
    played = play(cell_of(strategy, [warning()], ranks=2), tmp_path, seed=3)
    judged = replace(evidence(played, None), arm="faulted")
    assert not verdicts(judged)
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


def verdicts(judged: Evidence) -> dict[str, Finding]:
    """What failed."""
    found = {name: check(checker, judged) for name, checker in CHECKERS.items()}
    return {name: one for name, one in found.items() if one.verdict == "fail"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_all_places_fail_a_checkpoint_is_saved_and_nobody_moves(
    tmp_path: Path, ranks: int
) -> None:
    faults = [warning(target={"node": 0})]
    played = play(cell_of("hot-spare", faults, ranks=ranks), tmp_path, seed=3)
    decided = [e.data["reason"] for e in played.log.of(Kind.DECISION)]
    assert any("a checkpoint is saved before" in reason for reason in decided)
    assert not any("in place of" in reason or "nobody else" in reason for reason in decided)
    spares = [e for e in played.log.of(Kind.PROCESS_SPAWNED) if e.data["role"] == "spare"]
    assert len(spares) <= 2, "it is replaced once, and then kept"
    assert played.outcome == "completed"


def test_a_warning_while_nobody_supervises_is_not_lost(tmp_path: Path) -> None:
    faults = [{"id": "c", "kind": "coordinator-kill", "at": {"step": 30}}, warning()]
    played = play(cell_of("hot-spare", faults, ranks=2), tmp_path, seed=3)
    causes = [e.data["cause"] for e in played.log.of(Kind.FAILURE_DETECTED)]
    assert causes == ["warning"]
    judged = replace(evidence(played, None), arm="faulted")
    assert not verdicts(judged)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["drop-replica", "hot-spare"])
def test_a_warning_is_declared_once_whoever_supervises(tmp_path: Path, strategy: str) -> None:
    late = {"id": "c", "kind": "coordinator-kill", "at": {"step": 40}, "params": {"down_s": 0.1}}
    spares = {"strategy": "hot-spare", "spares": 1}
    faults = [warning(target={"node": 1}), late]
    cell = cell_of(
        spares if strategy == "hot-spare" else strategy,
        faults,
        ranks=4,
        launcher={"kind": "sim", "nodes": 2},
    )
    played = play(cell, tmp_path, seed=3)
    told = [e.data["process"] for e in played.log.of(Kind.FAILURE_DETECTED)]
    assert len(told) == len(set(told)) >= 2, told
    assert played.log.first(Kind.COORDINATOR_ADOPTED) is not None
    assert not verdicts(replace(evidence(played, None), arm="faulted"))


def test_the_only_holder_of_a_shard_moves_by_a_checkpoint(tmp_path: Path) -> None:
    cell = cell_of("hot-spare", [warning()], ranks=2, parallelism="fsdp")
    played = play(cell, tmp_path, seed=3)
    judged = replace(evidence(played, None), arm="faulted")
    assert not verdicts(judged)
    (incident,) = judged.measures.incidents
    assert (incident.outcome, incident.steps_lost) == ("recovered", 0)
    assert "nobody else holds the state" in str(
        [e.data["reason"] for e in played.log.of(Kind.DECISION)]
    )


def test_a_move_may_come_generations_after_its_warning(tmp_path: Path) -> None:
    """There is no spare at first: a checkpoint is saved, and the rank moves by a later one."""
    spare = {"id": "s", "kind": "spare-kill", "at": {"step": 31}}
    cell = cell_of("hot-spare", [spare, warning()], ranks=2, parallelism="fsdp")
    played = play(cell, tmp_path, seed=3)
    started = [e.data["cause"] for e in played.log.of(Kind.GENERATION_STARTED)]
    assert started == ["start", "grow", "failure"], started
    assert not verdicts(replace(evidence(played, None), arm="faulted"))


def test_a_warning_in_the_last_step_costs_nothing(tmp_path: Path) -> None:
    cell = cell_of("hot-spare", [warning(at={"step": 60})], ranks=2)
    judged = replace(evidence(play(cell, tmp_path, seed=3), None), arm="faulted")
    (incident,) = judged.measures.incidents
    assert (incident.outcome, incident.detected_by) == ("masked", "warning")
