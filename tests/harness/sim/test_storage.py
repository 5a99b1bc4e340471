"""Storage faults in simulation: saves fail, training does not; a torn save is never taken for a
checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.sim.test_sim import RESTART_ALL, SPARE, found, of
from tests.support.portions import long_but
from tests.support.search.simulate import KILL, cell_of
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Fault, Need
from trainchaos.chaos.plugins import FAULTS, load
from trainchaos.harness.launch.requirements import needs_of, parameters
from trainchaos.harness.launch.storage import DEFAULT_MIB
from trainchaos.harness.sim.world.storage import SimStorage


def storage(kind: str, step: int = 15, steps: int = 20, **params: Any) -> dict[str, Any]:
    """A lasting fault of the file system."""
    return {
        "id": "s",
        "kind": kind,
        "params": params,
        "at": {"step": step},
        "duration": {"steps": steps},
    }


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["disk-full", "read-only"])
def test_saves_fail_training_goes_on_and_the_last_good_checkpoint_is_restored(
    kind: str, memory: Path
) -> None:
    kill = {**KILL, "at": {"step": 33}}
    faulted, problems = found(cell_of(RESTART_ALL, [storage(kind), kill]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    failed = [event.step for event in of(faulted, Kind.CHECKPOINT_FAILED)]
    assert failed[:2] == [20, 30]
    said = {"disk-full": "No space left on device", "read-only": "Read-only file system"}[kind]
    assert said in of(faulted, Kind.CHECKPOINT_FAILED)[0].data["error"]
    assert of(faulted, Kind.GENERATION_READY)[-1].data["checkpoint"] == "step-00000010"
    committed = [event.step for event in of(faulted, Kind.CHECKPOINT_COMMITTED)]
    assert committed[-1] == 60, "the retry at a later interval works"


@pytest.mark.slow
def test_io_errors_with_a_probability_fail_some_saves_and_no_training(memory: Path) -> None:
    fault = {**storage("io-error", probability=0.2), "target": {"rank": 0}}
    faulted, problems = found(cell_of(SPARE, [fault], every=3), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    failed = [event.step or 0 for event in of(faulted, Kind.CHECKPOINT_FAILED)]
    committed = [event.step or 0 for event in of(faulted, Kind.CHECKPOINT_COMMITTED)]
    assert failed and all(15 <= step <= 35 for step in failed)
    assert any(15 < step < 35 for step in committed)


def test_a_slow_disk_makes_all_wait_and_nobody_suspect(memory: Path) -> None:
    fault = {**storage("io-slow", delay_s=0.1), "target": {"rank": 0}}
    faulted, problems = found(cell_of(SPARE, [fault]), memory, 3)
    assert problems == {}
    seconds = {
        event.step: event.data["seconds"] for event in of(faulted, Kind.CHECKPOINT_COMMITTED)
    }
    assert seconds[20] > 0.8 > seconds[10] and seconds[60] < 0.1
    assert not of(faulted, Kind.FAILURE_DETECTED)


def test_a_save_that_stands_still_is_a_hang_of_the_rank_that_saves(memory: Path) -> None:
    fault = {
        **storage("io-slow", delay_s=30),
        "target": {"rank": 0},
        "expect": {"detected_by": "hang"},
    }
    faulted, problems = found(cell_of(SPARE, [fault]), memory, 3)
    assert faulted.outcome == "completed"
    assert [event.data["rank"] for event in of(faulted, Kind.FAILURE_DETECTED)] == [0]
    assert "checkpoint" in of(faulted, Kind.FAILURE_DETECTED)[0].data["detail"]
    assert set(problems) <= {"fault-landed"}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["torn", "lose-unsynced"])
@pytest.mark.parametrize("stage", ["data", "manifest", "rename", "renamed"])
@pytest.mark.parametrize("recovery", long_but([RESTART_ALL, SPARE], RESTART_ALL))
def test_a_save_that_was_cut_off_is_never_restored_as_it_is(
    mode: str, stage: str, recovery: str, memory: Path
) -> None:
    torn = {
        "id": "t",
        "kind": "checkpoint-corrupt",
        "params": {"mode": mode, "stage": stage},
        "target": {"checkpoint": "latest"},
        "at": {"step": 25},
    }
    faulted, problems = found(cell_of(recovery, [torn]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert of(faulted, Kind.FAULT_LANDED)[0].data["evidence"] == {
        "signal": 9,
        "saving": "step-00000030",
    }
    if recovery == RESTART_ALL:
        whole = stage == "renamed"  # it was all there, though nobody had said so
        name = "step-00000030" if whole else "step-00000020"
        assert of(faulted, Kind.GENERATION_READY)[-1].data["checkpoint"] == name
        assert not of(faulted, Kind.CHECKPOINT_REFUSED)


def test_a_stage_is_for_saves_only() -> None:
    kind = load(FAULTS, Fault)["checkpoint-corrupt"]
    with pytest.raises(
        ValueError, match="stage is for the modes torn and lose-unsynced, not for bitflip"
    ):
        kind(mode="bitflip", stage="data")


def test_the_file_system_is_as_large_as_its_faults_say() -> None:
    cell = cell_of(SPARE, [storage("disk-full", size_mib=8)])
    assert needs_of(cell) == {Need.MOUNT}
    assert parameters(cell, "size_mib") == [8]
    assert parameters(cell_of(SPARE, [storage("read-only")]), "size_mib") == [DEFAULT_MIB]


def test_an_injector_that_does_nothing_is_noticed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimStorage, "fill", lambda self, *, shrink: None)
    faulted, problems = found(cell_of(SPARE, [storage("disk-full")]), memory, 3)
    assert set(problems) == {"fault-landed"}
    assert not of(faulted, Kind.CHECKPOINT_FAILED)
