"""When faults act, in simulation: where they were planned, several at once, and on whoever has the
place by then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.sim.test_sim import found
from tests.support.portions import long_but
from tests.support.search.simulate import KILL, Played, cell_of, play
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.launchers.sim import Sim

FAST = Sim(step_ms=2, checkpoint_ms=1, spread_ms=0.1)
"""Steps of 2 ms: the supervisor looks at every tenth."""


def steps_during(played: Played, fault: str, rank: str = "w0") -> list[int]:
    """Steps that a rank committed between the injection of a fault and its heal."""

    def when(kind: Kind) -> int:
        return next(e.time_ns for e in played.log.of(kind) if e.data["fault"] == fault)

    begin, end = when(Kind.FAULT_INJECTED), when(Kind.FAULT_HEALED)
    return [
        e.step or 0
        for e in played.log.of(Kind.STEP_COMMITTED)
        if e.actor == rank and begin < e.time_ns < end
    ]


def false_alarms(played: Played) -> list[Event]:
    """Failures that are none of values or exits."""
    return [
        e
        for e in played.log.of(Kind.FAILURE_DETECTED)
        if e.data["cause"] not in ("nonfinite", "exit")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk-full", "read-only", "store-latency"])
@pytest.mark.parametrize("phase", ["data", "backward", "optimizer"])
def test_what_is_no_ranks_is_in_force_in_the_planned_steps_exactly(
    kind: str, phase: str, memory: Path
) -> None:
    params = {"latency_ms": 5} if kind == "store-latency" else {}
    fault = {
        "id": "f",
        "kind": kind,
        "params": params,
        "at": {"step": 15, "phase": phase},
        "duration": {"steps": 20},
    }
    played = play(cell_of("hot-spare", [fault], steps=100), memory, seed=3, sim=FAST)
    assert played.outcome == "completed" and not false_alarms(played)
    for rank in ("w0", "w1", "w2", "w3"):
        assert steps_during(played, "f", rank) == list(range(15, 35))
    (injected,) = played.log.of(Kind.FAULT_INJECTED)
    assert injected.step == 15 and "late_steps" not in injected.data


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    long_but(["hot-spare", "drop-replica", "checkpoint-restart"], "hot-spare"),
)
def test_a_poisoned_sample_that_comes_again_and_a_fault_at_recovered_stall_nobody(
    strategy: str, memory: Path
) -> None:
    poison = {"id": "p", "kind": "poison-sample", "at": {"step": 20}, "retrigger": {"max": 3}}
    slow = {
        "id": "s",
        "kind": "straggler",
        "params": {"factor": 3},
        "duration": {"steps": 5},
        "target": {"rank": 1},
        "at": {"event": "recovered"},
    }
    for seed in range(2):
        played = play(cell_of(strategy, [poison, slow]), memory / str(seed), seed=seed)
        assert played.outcome == "completed" and false_alarms(played) == []


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("strategy", ["hot-spare", "checkpoint-restart"])
def test_who_takes_the_rank_of_a_target_that_died_where_it_held_is_hit(
    strategy: str, memory: Path
) -> None:
    """Rank 2 holds for a stop that rank 1, which is slow, is to suffer too, and is killed
    meanwhile.
    """
    slow = {
        "id": "slow",
        "kind": "data-stall",
        "params": {"delay_s": 0.3},
        "duration": {"steps": 1},
        "target": {"rank": 1},
        "at": {"step": 33},
    }
    stop: dict[str, Any] = {
        "id": "stop",
        "kind": "process-stop",
        "target": {"exclude": {"ranks": [0, 3]}, "select": "all"},
        "duration": 0.2,
        "at": {"step": 33, "phase": "forward"},
    }
    kill = {**KILL, "at": {"time": 1.45}}
    faulted, problems = found(cell_of(strategy, [slow, stop, kill], steps=100), memory, 3)
    said = problems.pop("fault-landed", "slow (")
    assert "slow (" in said and "stop (" not in said and problems == {}, (
        "the delay may have nobody left to be seen in"
    )
    spawned = [e.data["process"] for e in faulted.log.of(Kind.PROCESS_SPAWNED)]
    struck = [e for e in faulted.log.of(Kind.FAULT_INJECTED) if e.data["fault"] == "stop"]
    assert {e.data["target"]["rank"] for e in struck} == {1, 2}
    (second,) = [e.data["target"]["process"] for e in struck if e.data["target"]["rank"] == 2]
    assert second in spawned and second != "w2", "the one that died never counted as stopped"


@pytest.mark.slow
def test_a_fault_that_acts_everywhere_does_not_take_a_notice_from_the_fault_that_gave_it(
    memory: Path,
) -> None:
    """Nobody hears of the notice until the coordinator is back; by then a sample was poisoned in
    that rank too.
    """
    faults: list[dict[str, Any]] = [
        {"id": "poison", "kind": "poison-sample", "at": {"step": 9}},
        {"id": "term", "kind": "process-term", "target": {"rank": 2}, "at": {"time": 0.18}},
        {"id": "lost", "kind": "coordinator-kill", "params": {"down_s": 0.4}, "at": {"time": 0.18}},
    ]
    faulted, problems = found(cell_of("drop-replica", faults), memory, 3)
    causes = [e.data["cause"] for e in faulted.log.of(Kind.FAILURE_DETECTED)]
    order = [e.kind for e in faulted.log.of(Kind.FAULT_INJECTED, Kind.FAILURE_DETECTED)]
    assert causes[0] == "notice" and order[:4] == [Kind.FAULT_INJECTED] * 3 + [
        Kind.FAILURE_DETECTED
    ]
    assert problems == {}
