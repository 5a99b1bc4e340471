"""Where several ranks write parts of one checkpoint, each of them can be hit while it saves: in
simulation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.sim.test_sim import RESTART_ALL, SPARE, found, of
from tests.harness.sim.test_storage import storage
from tests.support.search.simulate import cell_of
from trainchaos.chaos.events.log import Event, Kind

SHAPES: list[dict[str, Any]] = [{"sharded": True}, {"parallelism": "fsdp"}]
NAMES = ["ddp, sharded", "fsdp"]


def parts(faulted: Any, state: str) -> list[Event]:
    """What ranks that do not commit said of their parts."""
    return [event for event in of(faulted, Kind.CHECKPOINT_PART) if event.data["state"] == state]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_a_part_that_cannot_be_written_fails_the_save_and_no_training(
    shape: dict[str, Any], memory: Path
) -> None:
    fault = {**storage("io-error"), "target": {"rank": 2}}
    faulted, problems = found(cell_of(RESTART_ALL, [fault], **shape), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    (landed,) = of(faulted, Kind.FAULT_LANDED)
    assert "Input/output error" in landed.data["evidence"]["error"]
    failed = of(faulted, Kind.CHECKPOINT_FAILED)
    assert [event.step for event in failed] == [20, 30]
    assert all(
        "writer 2 gave up: OSError: [Errno 5] Input/output error" in e.data["error"] for e in failed
    )
    assert len({event.actor for event in parts(faulted, "failed")}) == 1, (
        "the others' parts came whole"
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_a_slow_disk_of_one_rank_makes_the_save_wait(shape: dict[str, Any], memory: Path) -> None:
    fault = {**storage("io-slow", delay_s=0.1), "target": {"rank": 3}}
    faulted, problems = found(cell_of(RESTART_ALL, [fault], **shape), memory, 3)
    assert problems == {}
    seconds = {
        event.step: event.data["seconds"] for event in of(faulted, Kind.CHECKPOINT_COMMITTED)
    }
    assert seconds[20] > 0.8 > seconds[10] and seconds[60] < 0.1
    assert not of(faulted, Kind.FAILURE_DETECTED)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
@pytest.mark.parametrize("mode", ["torn", "lose-unsynced"])
@pytest.mark.parametrize("stage", ["data", "manifest", "rename"])
def test_a_rank_that_dies_in_its_part_leaves_no_checkpoint(
    stage: str, mode: str, shape: dict[str, Any], memory: Path
) -> None:
    torn = {
        "id": "t",
        "kind": "checkpoint-corrupt",
        "params": {"mode": mode, "stage": stage},
        "target": {"checkpoint": "latest", "rank": 2},
        "at": {"step": 25},
    }
    faulted, problems = found(cell_of(RESTART_ALL, [torn], **shape), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    (landed,) = of(faulted, Kind.FAULT_LANDED)
    assert landed.data["evidence"] == {"signal": 9, "saving": "step-00000030"}
    assert [event.data["rank"] for event in of(faulted, Kind.FAILURE_DETECTED)] == [2]
    assert of(faulted, Kind.GENERATION_READY)[-1].data["checkpoint"] == "step-00000020"
    assert not of(faulted, Kind.CHECKPOINT_REFUSED)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", [RESTART_ALL, SPARE])
def test_a_rank_killed_while_all_save_is_replaced(recovery: Any, memory: Path) -> None:
    kill = {
        "id": "k",
        "kind": "process-kill",
        "target": {"rank": 2},
        "at": {"step": 30, "phase": "checkpoint"},
    }
    faulted, problems = found(cell_of(recovery, [kill], sharded=True), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    (killed,) = of(faulted, Kind.FAULT_INJECTED)
    begun = [
        e
        for e in parts(faulted, "begun")
        if e.actor == killed.data["target"]["process"] and e.step == 30
    ]
    assert begun and begun[0].time_ns <= killed.time_ns, "it had begun to save"
