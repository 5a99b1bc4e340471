"""Simulated checkpoints in memory: they survive ranks, a node takes its own with it, and every
checker agrees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.arms import judged
from tests.support.portions import first_in_test, long_but
from tests.support.search.simulate import Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.memory.header import is_memory

ALL = ["checkpoint-restart", "drop-replica", "hot-spare"]
NODES = {"kind": "sim", "nodes": 2}


@pytest.fixture
def room(memory: Path) -> Path:
    """Where arms are played: ``memory`` is a word of theirs."""
    return memory


def arm(
    root: Path,
    fault: dict[str, Any],
    *,
    recovery: str = "checkpoint-restart",
    memory: Any = True,
    seed: int = 3,
    parallelism: Any = "ddp",
) -> Played:
    """A faulted arm with which every checker agrees."""
    faults = [{"id": "f", "at": {"step": 33}, **fault}]
    cell = cell_of(
        recovery, faults, launcher=NODES, every=25, memory=memory, parallelism=parallelism
    )
    faulted, control = play(cell, root, seed=seed), play(cell, root, seed=seed, arm="control")
    found = evidence(faulted, control)
    assert {n: f.witness for n, f in judged(found).items() if f.verdict != "pass"} == {}
    assert faulted.outcome == "completed"
    return faulted


def restored(played: Played) -> list[tuple[str, int]]:
    """Checkpoints that generations began with, and their steps."""
    ready = played.log.of(Kind.GENERATION_READY)
    return [(e.data["checkpoint"], e.data["resume_step"]) for e in ready if e.data["checkpoint"]]


KILL = {"kind": "process-kill", "target": {"rank": 2}}
NODE = {"kind": "node-kill", "target": {"node": 0}}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("every", "at"), [(1, 32), (5, 30), (10, 30)])
def test_a_restart_reads_memory_and_loses_less_than_two_intervals(
    room: Path, every: int, at: int
) -> None:
    ((name, step),) = restored(arm(room, KILL, memory={"every": every}))
    assert is_memory(name) and at - every <= step <= 32


@pytest.mark.slow
def test_without_it_the_disk_is_read(room: Path) -> None:
    assert restored(arm(room, KILL, memory=False)) == [("step-00000025", 25)]


@pytest.mark.slow
def test_a_lost_node_costs_nothing_with_a_copy_and_all_of_memory_without(room: Path) -> None:
    ((name, step),) = restored(arm(room / "copied", NODE, memory={"every": 5}))
    assert is_memory(name) and step == 30
    assert restored(arm(room / "alone", NODE, memory={"every": 5, "replicate": False})) == [
        ("step-00000025", 25)
    ]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", ALL)
@pytest.mark.parametrize("fault", [KILL, NODE], ids=["rank", "node"])
def test_every_strategy_gets_on_with_it(room: Path, recovery: str, fault: dict[str, Any]) -> None:
    played = arm(room, fault, recovery=recovery, memory={"every": 2})
    names = [name for name, _ in restored(played)]
    assert bool(names) == (recovery == "checkpoint-restart"), "with a living peer nobody goes back"
    assert all(is_memory(name) for name in names)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", long_but(ALL, "hot-spare"))
@pytest.mark.parametrize("fault", [KILL, NODE], ids=["rank", "node"])
def test_a_model_of_which_there_is_one_copy_is_filled_from_memory(
    room: Path, recovery: str, fault: dict[str, Any]
) -> None:
    found = restored(arm(room, fault, recovery=recovery, memory={"every": 2}, parallelism="fsdp"))
    assert is_memory(found[0][0]) and found[0][1] >= 30


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", first_in_test(12, 2))
def test_the_same_seed_gives_the_same_log(room: Path, seed: int) -> None:
    one, two = (arm(room / name, NODE, memory={"every": 1}, seed=seed) for name in ("one", "two"))
    assert [e.to_line() for e in one.log.events] == [e.to_line() for e in two.log.events]
