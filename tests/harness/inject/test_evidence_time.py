"""Which time counts of that in which nobody saw an effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.inject.test_injector import SECOND, Rig
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.inject.occurrences import ENDED_BEFORE, EVIDENCE_LIMIT_S, LONGEST_S

LIMIT = int(EVIDENCE_LIMIT_S * SECOND)


def struck(folder: Path, kind: str, phase: str, **more: Any) -> Rig:
    """A fault in rank 2 at step 9, which has acted and shows nothing."""
    rig = Rig(folder, kind, {"step": 9, "phase": phase}, **more)
    rig.train()
    rig.injector.tick(8)
    rig.at_point("w2", 2, 9, phase)
    assert len(rig.scene.told("fault_injected")) == 1
    return rig


def reasons(rig: Rig) -> list[str]:
    """Why it did not land."""
    return [failed["reason"] for failed in rig.scene.told("fault_failed")]


def later(rig: Rig, ns: int, committed: int = 9) -> None:
    """So much later, looked at every second."""
    for _ in range(ns // SECOND):
        rig.scene.now += SECOND
        rig.injector.tick(committed)


def test_what_shows_in_training_is_waited_for_while_there_is_some(tmp_path: Path) -> None:
    rig = struck(tmp_path, "exception", "data")
    later(rig, LIMIT // 2)
    rig.scene.record(Kind.ABORT_SENT, processes=["w0", "w1", "w3"])
    later(rig, 4 * LIMIT)
    assert reasons(rig) == [], "nobody trained"
    rig.injector.on_training()
    later(rig, LIMIT)
    assert reasons(rig) == ["no evidence within 16 s of training"]


def test_what_the_kernel_shows_is_waited_for_whatever_the_job_does(tmp_path: Path) -> None:
    rig = struck(tmp_path, "process-kill", "data")
    rig.scene.record(Kind.ABORT_SENT, processes=["w0", "w1", "w3"])
    later(rig, LIMIT + 2 * SECOND)
    assert reasons(rig) == ["no evidence within 16 s"]


def test_a_target_that_ended_for_another_reason_is_named_as_such(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "process-kill", {"time": 1})
    rig.train()
    rig.scene.now = 2 * SECOND
    rig.injector.tick(3)
    ended = {"process": "w2", "pid": 1, "exit_code": None, "signal": 11, "expected": False}
    rig.injector.observe(rig.scene.record(Kind.PROCESS_EXITED, **ended, last_seq=None))
    later(rig, LIMIT + 2 * SECOND)
    assert reasons(rig) == [ENDED_BEFORE]


@pytest.mark.parametrize(("rank", "counts"), [(None, True), (1, False)])
def test_the_loss_of_a_spare_ends_no_training(
    tmp_path: Path, rank: int | None, counts: bool
) -> None:
    rig = struck(tmp_path, "exception", "data")
    lost = {"failure": 1, "cause": "exit", "process": "x", "rank": rank, "detail": "signal 9"}
    rig.scene.record(Kind.FAILURE_DETECTED, **lost)
    later(rig, LIMIT + 2 * SECOND)
    assert bool(reasons(rig)) == counts


@pytest.mark.parametrize(("kind", "told"), [("heartbeat-drop", 1), ("straggler", 0)])
def test_a_rank_that_nobody_sees_is_told_when_it_is_to_be_seen_again(
    tmp_path: Path, kind: str, told: int
) -> None:
    params = {"factor": 2} if kind == "straggler" else {}
    rig = struck(tmp_path, kind, "data", duration=3.0, params=params)
    later(rig, 4 * SECOND)
    assert rig.scene.told("over") == []
    later(rig, 9 * SECOND)
    assert rig.scene.told("over") == [{"process": "w2", "fault": "f", "occurrence": 0}] * told


def test_nothing_is_waited_for_for_ever(tmp_path: Path) -> None:
    rig = struck(tmp_path, "exception", "data")
    rig.scene.record(Kind.ABORT_SENT, processes=["w0", "w1", "w3"])
    later(rig, int((LONGEST_S + EVIDENCE_LIMIT_S + 2) * SECOND))
    assert len(reasons(rig)) == 1
