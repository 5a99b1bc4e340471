"""Sharded layouts in simulation: lost supervisors, notices, non-finite values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.recovery.supervise.test_adoption import Fragile, adoptions, problems
from tests.support.arms import judged
from tests.support.portions import long_but
from tests.support.search import simulate
from tests.support.search.simulate import Played, cell_of, control_of, evidence, play
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.model import Cell

FSDP = "fsdp"
TWO: dict[str, Any] = {"hsdp": {"replicas": 2, "shards": 2}}
DROP, SPARE = "drop-replica", "hot-spare"
KILL = {
    "id": "kill",
    "kind": "process-kill",
    "target": {"rank": 3},
    "at": {"step": 33, "phase": "backward"},
}


def of(played: Played, kind: Kind) -> list[Event]:
    """Events of a kind."""
    return list(played.log.of(kind))


def members(played: Played) -> list[list[str]]:
    """Of each generation."""
    return [event.data["members"] for event in of(played, Kind.GENERATION_STARTED)]


def both(cell: Cell, root: Path, seed: int = 3) -> tuple[Played, dict[str, str]]:
    """The faulted arm, and what did not pass."""
    faulted = play(cell, root, seed=seed)
    control = control_of(cell, seed=seed)
    assert faulted.outcome == control.outcome == "completed"
    assert {f.verdict for f in judged(evidence(control, None)).values()} == {"pass"}
    return faulted, problems(faulted, control)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("strategy", long_but([DROP, SPARE], DROP))
def test_a_supervisor_lost_in_the_middle_of_any_act(
    strategy: str, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds which shard, and who waits for a whole replica, is in the log."""
    control = play(
        cell_of(strategy, [], parallelism=TWO), memory / "control", seed=4, arm="control"
    )
    monkeypatch.setattr(simulate, "Orchestrator", Fragile)
    taken = 0
    for at in range(1, 200):
        Fragile.at, Fragile.acts = at, 0
        played = play(cell_of(strategy, [KILL], parallelism=TWO), memory / str(at), seed=4)
        if not adoptions(played):
            break
        taken += 1
        assert played.outcome == "completed", f"act {at}"
        assert problems(played, control, "detection") == {}, f"act {at}"
        if of(played, Kind.GENERATION_READY)[0].time_ns < adoptions(played)[0].time_ns:
            states = {event.data["state"] for event in of(played, Kind.GENERATION_STARTED)}
            assert "checkpoint" not in states, f"act {at}: it forgot who holds what"
    assert taken > 30


def test_a_broken_replica_waits_and_comes_back_with_its_replacement(memory: Path) -> None:
    faulted, found = both(cell_of(DROP, [KILL], parallelism=TWO), memory)
    assert found == {}
    assert members(faulted) == [["w0", "w1", "w2", "w3"], ["w0", "w1"], ["w0", "w1", "w2", "w4"]]
    assert all(
        event.data["expected"]
        for event in of(faulted, Kind.PROCESS_EXITED)
        if event.data["process"] == "w2"
    )
    grown = of(faulted, Kind.GENERATION_STARTED)[-1].data
    assert (grown["shards"], grown["sources"]) == (2, {"w2": "w0", "w4": "w1"})


def test_what_is_left_of_two_replicas_makes_one(memory: Path) -> None:
    both_hit = {**KILL, "target": {"select": {"count": 2}, "exclude": {"ranks": [1, 2]}}}
    faulted, found = both(cell_of(DROP, [both_hit], parallelism=TWO), memory)
    assert found == {}
    assert members(faulted)[1] == ["w2", "w1"], "a process keeps its shard, not its replica"
    assert {e.data["state"] for e in of(faulted, Kind.GENERATION_STARTED)} == {"initial", "peer"}


def test_survivors_of_a_lost_shard_keep_their_places_and_restore(memory: Path) -> None:
    faulted, found = both(cell_of(SPARE, [KILL], parallelism=FSDP), memory)
    assert found == {}
    assert members(faulted)[1] == ["w0", "w1", "w2", "s4"]
    decided = of(faulted, Kind.DECISION)[0].data["reason"]
    assert "no second copy of shard 3: only a checkpoint or a memory copy can help" in decided


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [FSDP, TWO], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("strategy", [DROP, SPARE])
def test_a_noticed_rank_leaves_before_its_deadline_and_no_step_is_lost(
    strategy: str, shape: Any, memory: Path
) -> None:
    notice = {**KILL, "kind": "process-term", "params": {"grace_s": 30}}
    faulted, found = both(cell_of(strategy, [notice], parallelism=shape), memory)
    assert found == {}
    resumed = [event.data["resume_step"] for event in of(faulted, Kind.GENERATION_READY)]
    assert resumed[1] >= 33, (
        "where nobody else holds the shard, a checkpoint of that very step does"
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("surface", ["gradient", "parameter"])
@pytest.mark.parametrize(
    "shape", [pytest.param(FSDP, marks=pytest.mark.long), TWO], ids=["fsdp", "hsdp"]
)
def test_non_finite_values(shape: Any, surface: str, memory: Path) -> None:
    """A bad gradient is computed again; bad parameters spoil the whole replica, which another one
    refills.
    """
    fault = {**KILL, "kind": "tensor-corrupt", "params": {"surface": surface, "op": "nan"}}
    faulted, found = both(cell_of(SPARE, [fault], parallelism=shape), memory)
    assert found == {}
    states = [event.data["state"] for event in of(faulted, Kind.GENERATION_STARTED)]
    lost = shape == FSDP and surface == "parameter"
    assert states == ["initial", "checkpoint" if lost else "peer"]
