"""``chaos fuzz`` finds every planted defect (``tests/support/search/planted.py``), and what it is
found by is that defect. Those that it seldom comes upon have a scenario made for them, too.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.planted import PAGE, RESULTS, merged, read, summary
from tests.support.search.planted import PLANTED, sought
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.harness.fuzz.play.oracle import find_in
from trainchaos.harness.fuzz.play.play import SimPlayer

LEAST = 30
QUICK = ("the batch of the next step", "a digest ignores the optimizer")
"""Found at once, so that every day shows that the search would find something."""
SELDOM = ("a torn state is taken for whole",)
"""Found by one search in three or by none: only the scenario made for it is asked for."""
Fault = dict[str, Any]
SEARCHES = 3


def kill(step: int = 20) -> Fault:
    return {
        "kind": "process-kill",
        "at": {"step": step, "phase": "backward"},
        "target": {"rank": 1},
    }


def lost(event: str) -> Fault:
    """The coordinator, when this happens."""
    return {"kind": "coordinator-kill", "at": {"event": event}}


def rot(step: int = 20) -> Fault:
    return {"kind": "checkpoint-corrupt", "at": {"step": step}, "target": {"checkpoint": "latest"}}


DESYNC: Fault = {"kind": "replica-desync", "at": {"step": 21}, "target": {"rank": 1}}
AGAIN: Fault = {"kind": "process-kill", "at": {"event": "regroup"}, "target": {"rank": 2}}
SOURCE: Fault = {
    "kind": "process-kill",
    "at": {"event": "regroup", "nth": 2},
    "target": {"rank": 0},
}
NAN: Fault = {**kill(), "kind": "tensor-corrupt", "params": {"op": "nan"}}
POISON: Fault = {"kind": "poison-sample", "at": {"step": 10}, "target": {"rank": 1}}
STOP: Fault = {"kind": "process-stop", "at": {"step": 20}, "target": {"rank": 1}}
COMPARED: dict[str, Any] = {"verify_every": 5, "every": 1, "ranks": 2}
SHOWN: dict[str, tuple[list[Fault], dict[str, Any]]] = {
    "samples are left out one step late": ([POISON], {}),
    # who copies to the one that comes is lost meanwhile
    "a torn state is taken for whole": ([kill(), SOURCE], {"ranks": 2, "steps": 100}),
    "a checkpoint is restored unverified": ([rot(), kill(22)], {}),
    "a doubtful checkpoint is restored": ([DESYNC], COMPARED),
    "nobody tells a rank which checkpoints are in doubt": ([DESYNC], COMPARED),
    "the agreed checkpoint is pruned": ([DESYNC], {"verify_every": 20, "every": 2, "keep": 1}),
    "the last good checkpoint is pruned": ([rot(), kill(30)], {}),
    "a job that lost its checkpoints begins anew": ([rot(), kill(22)], {"keep": 1, "every": 15}),
    "an exit while a group forms is not heard": ([kill(), AGAIN], {}),
    "a replacement is not taken in": ([kill()], {"steps": 150}),
    "spares are not replaced": ([kill()], {"steps": 150}),
    "values that are not finite are blamed on the next rank": ([NAN], {}),
    "replicas that differ are not noticed": ([DESYNC], {"verify_every": 5}),
    "a pause is asked for again and again": ([kill()], {"steps": 150}),
    "whoever takes over forgets who failed": ([kill(), lost("recovery_started")], {}),
    "whoever takes over leaves the condemned alive": ([STOP, lost("recovery_started")], {}),
    "whoever takes over forgets the samples left out": (
        [POISON, {"kind": "coordinator-kill", "at": {"step": 20}}, kill(30)],
        {},
    ),
}
EVERY_DAY = ("a doubtful checkpoint is restored",)


def tree(name: str) -> dict[str, Any]:
    faults, more = SHOWN[name]
    rules = {"ranks": 4, "steps": 60, "every": 6, "keep": 3, **more}
    checkpoint = {key: rules.pop(key) for key in ("every", "keep")}
    job = {
        "kind": "mlp",
        "parallelism": "ddp",
        "global_batch": 12,
        "checkpoint": checkpoint,
        **rules,
    }
    return {
        "version": 1,
        "name": "planted",
        "seed": 5,
        "launcher": {"kind": "sim", "nodes": 2},
        "workload": job,
        "recovery": {"strategy": PLANTED[name].strategy},
        "faults": [{"id": f"f{number}", **fault} for number, fault in enumerate(faults)],
        "stop_conditions": [{"when": "no_committed_step_for > 120s"}],
    }


def found(name: str) -> bool:
    """Whether one of the first searches of the benchmark finds it; what shows without the defect is
    no find (``sought``). More than one, as any change of the draw decides what a single one happens
    to come upon.
    """
    return any(sought(PLANTED[name], seed=f"{name} {number}").finds for number in range(SEARCHES))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", QUICK)
def test_a_defect_that_shows_at_once_is_found(name: str) -> None:
    assert found(name)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PLANTED if name not in QUICK + SELDOM])
def test_a_planted_defect_is_found(name: str) -> None:
    assert found(name), f"not within {SEARCHES} searches of {PLANTED[name].runs} scenarios"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in EVERY_DAY else [pytest.mark.long]) for name in SHOWN],
)
def test_a_scenario_made_for_it_shows_it(name: str) -> None:
    planted, catalogue = PLANTED[name], build_catalogue()
    assert find_in(tree(name), SimPlayer(catalogue=catalogue).play(tree(name))) is None
    with planted.planted():
        player = SimPlayer(
            catalogue=catalogue, behaviour=planted.behaviour, strategy=planted.instead
        )  # type: ignore[arg-type]
        assert find_in(tree(name), player.play(tree(name))) is not None


def test_there_are_enough_and_the_page_shows_what_became_of_each() -> None:
    rows = merged(read([RESULTS]))
    assert len(PLANTED) >= LEAST
    unsearched = set(PLANTED) - {row["name"] for row in rows}
    assert unsearched <= set(SHOWN), "python -m benchmarks.planted NAME searches for what is new"
    assert summary(rows) in PAGE.read_text(), "python -m benchmarks.planted --table"
