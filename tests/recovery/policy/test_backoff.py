"""Failures are judged by how close together they are: waiting, places to avoid, recoveries without
progress.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.sim.test_sim import of
from tests.recovery.policy.test_strategies import view_of
from tests.recovery.supervise.test_controller import TIMING, Rig
from tests.recovery.transport.test_versions import told, trains
from tests.support.search.simulate import cell_of, play
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.harness.arm.roster import Placement
from trainchaos.harness.launchers.sim import Sim
from trainchaos.recovery.cli.roster import LeastTaken
from trainchaos.recovery.health.reputation import Reputation
from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.backoff import BackoffSchedule
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import Cause, Failure, Spawn
from trainchaos.recovery.supervise.controller import Stage

HOUR_S, DAY_S = 3600.0, 86400.0


def test_a_row_of_failures_costs_more_and_more_and_is_forgotten() -> None:
    row = BackoffSchedule(free=2, first_s=10.0, most_s=60.0)
    assert row.again_s([]) == row.again_s([5.0, 6.5]) == -math.inf
    assert row.again_s([5.0, 6.5, 8.0]) == 18.0
    times = [5.0, 6.5, 8.0, 18.0, 38.0, 78.0, 138.0, 198.0]
    assert [row.again_s(times[:n]) - times[n - 1] for n in range(4, 9)] == [
        20.0,
        40.0,
        60.0,
        60.0,
        60.0,
    ]
    assert row.again_s([*times, 198.0 + 60.0 + 301.0]) == -math.inf, (
        "what was tried last has lasted"
    )
    assert row.again_s([n * DAY_S for n in range(1000)]) == -math.inf
    assert row.again_s([7.0] * 64) == -math.inf, (
        "a node that is lost is one failure, whatever was on it"
    )
    assert row.again_s([7.0] * 4, together=3) == -math.inf, "one, and one more"
    assert row.again_s([7.0] * 5, together=3) == 17.0, "they were not there at the same time"
    assert (
        BackoffSchedule(free=0, first_s=5.0, most_s=math.inf).again_s(map(float, range(0, 4000, 2)))
        < math.inf
    )


def outsiders(*times_s: float, cause: Cause = Cause.EXIT) -> tuple[Failure, ...]:
    return tuple(
        Failure(process=f"x{t}", rank=None, cause=cause, step=1, time_s=t) for t in times_s
    )


@pytest.mark.parametrize("strategy", [HotSpare(), DropReplica()], ids=repr)
def test_spares_lost_over_months_are_replaced_and_a_row_of_them_later(
    strategy: HotSpare | DropReplica,
) -> None:
    seen = replace(view_of(strategy, "PPP", world=4), failures=(), now_s=100 * DAY_S)
    months = outsiders(*(n * DAY_S for n in range(100)))
    missing = (Spawn(role="spare" if isinstance(strategy, HotSpare) else "worker"),)
    assert set(strategy.on_spare_lost(replace(seen, history=months)).actions) == set(missing)
    node = replace(seen, history=(*months, *(outsiders(seen.now_s) * 20)))
    assert strategy.on_spare_lost(replace(node, spares=20)).actions, "lost with a node"
    assert not strategy.on_spare_lost(replace(node, spares=1)).actions, (
        "they cannot have been there together"
    )
    row = outsiders(*(seen.now_s - 4 * n for n in range(11)))
    later = strategy.on_spare_lost(replace(seen, history=(*months, *row)))
    assert (later.actions, later.again_s) == ((), seen.now_s + 5.0)
    assert "one after the other: the next one is started in 5 s" in later.reason
    again = replace(seen, history=(*months, *row), now_s=seen.now_s + 5.0)
    assert strategy.on_spare_lost(again).actions


def train_for(rig: Rig, seconds: float) -> None:
    """One step every 0.2 s."""
    step = rig.control.committed
    for number in range(step + 1, step + 1 + round(seconds / 0.2)):
        rig.hands.now += 0.2
        rig.at(*rig.members, step=number, committed=number)
        rig.control.tick()
    assert rig.stage is Stage.TRAINING


def test_a_misfit_is_tried_again_much_later() -> None:
    rig = trains(Rig(HotSpare()))
    rig.die("s4")
    for number, wait_s in ((5, 60.0), (6, 120.0), (7, 240.0)):
        told(rig, f"s{number}", torch="2.11.0")
        rig.die(f"s{number}")
        train_for(rig, wait_s - 1.0)
        assert rig.names()[-1] == f"s{number}"
        train_for(rig, 2.0)
    told(rig, "s8")  # the upgrade was taken back
    assert (rig.stage, rig.control.job.ready_spares) == (Stage.TRAINING, ("s8",))


def lose(rig: Rig, victim: str) -> None:
    """A member dies in the middle of step 11, and the others go on without it, or with a spare."""
    rig.at(*rig.members, step=11, committed=10)
    rig.die(victim)
    rig.park(*(name for name in rig.members if name != victim), step=10)
    if rig.stage is Stage.FORMING:
        rig.join(*rig.members, step=10)


@pytest.mark.parametrize("which", [0, 7, -1])
def test_single_losses_within_one_long_step_do_not_end_a_large_job(which: int) -> None:
    rig = Rig(DropReplica(), world=64)
    rig.train(steps=10)
    for left in range(63, 52, -1):
        lose(rig, rig.members[which])
        rig.wait(0.2)
        assert (rig.stage, len(rig.members)) == (Stage.TRAINING, left)
    rig.at(*rig.members, step=12, committed=11)
    rig.control.tick()
    assert rig.control.committed == 11


def test_half_of_the_ranks_lost_without_one_step_is_enough() -> None:
    rig = Rig(DropReplica(), world=64)
    rig.train(steps=10)
    for _ in range(32):
        lose(rig, rig.members[0])
        assert rig.stage is Stage.TRAINING
    lose(rig, rig.members[0])
    assert rig.control.outcome == "gave-up"
    assert rig.control.reason == "32 recoveries in a row brought no new step after 10"


def test_the_same_places_again_and_again_are_a_loop_in_a_large_job_too() -> None:
    rig = Rig(HotSpare(spares=64), world=64)
    rig.train(steps=10)
    for attempt in range(2 + TIMING.max_attempts):
        assert rig.stage is Stage.TRAINING, attempt
        lose(rig, rig.members[attempt % 2])
    assert (
        rig.control.reason
        == f"{1 + TIMING.max_attempts} recoveries in a row brought no new step after 10"
    )


def test_the_history_is_bounded_and_keeps_what_counts() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=10)
    book = rig.control.job.failures
    for generation in range(1, 5000):
        book.current = [
            Failure(
                process="", rank=None, cause=Cause.ERROR, step=1, time_s=1.0, generation=generation
            )
        ]
        book.answered("failure")
    assert 1000 <= len(book.history) <= 1001
    assert book.history[-1].generation == 4999


def test_a_place_that_keeps_failing_is_avoided_for_a_while() -> None:
    now_s, spot = 11.0, (1, "cpu")
    seen = Reputation(lambda: now_s)
    for time_s in (0.0, 0.1, 0.2, 10.0):
        seen.failed(spot, time_s)
    assert not seen.avoids(spot) and not seen.avoids((0, "cpu")), "twice may be chance"
    for failed_s, avoided_s in ((20.0, 60.0), (82.0, 120.0)):  # the longer, the longer the row
        seen.failed(spot, failed_s)
        now_s = failed_s + avoided_s - 1
        assert seen.avoids(spot)
        now_s += 2
        assert not seen.avoids(spot)
    now_s = DAY_S
    seen.failed(spot)
    assert not seen.avoids(spot)


def test_a_replacement_is_not_placed_where_others_keep_failing() -> None:
    placement = Placement(Topology(ranks=4, nodes=3), spares=0)
    for name in ("w0", "w1", "w2", "w3"):
        placement.place(name, "worker", [], (0, 1, 2))
    left = ["w2", "w3"]  # node 0 lacks two
    assert placement.place("w4", "worker", left, (0, 1, 2), avoid=[0]) == 2
    assert placement.place("w5", "worker", [*left, "w4"], (0, 1), avoid=[0]) == 1, (
        "there is no other"
    )
    assert placement.place("w6", "worker", left, (0,), avoid=[0]) == 0

    cpus = [(0, "cpu"), (1, "cpu")]
    assert LeastTaken(cpus, [(1, "cpu")], cpus[0].__eq__).best() == cpus[1]
    gpus = [(0, "cuda:0"), (1, "cuda:0")]
    assert LeastTaken(gpus, [], gpus[0].__eq__).best() == gpus[1]
    assert LeastTaken(gpus, gpus[1:], gpus[0].__eq__).best() == gpus[0], "never two on one"


@pytest.mark.slow
def test_simulated_ranks_that_keep_failing_on_a_node_are_replaced_elsewhere(memory: Path) -> None:
    kills = [{"id": f"k{n}", "kind": "spare-kill", "at": {"step": 10 * n}} for n in range(1, 5)]
    cell = cell_of("hot-spare", kills, launcher={"kind": "sim", "nodes": 3})
    played = play(cell, memory, seed=3, sim=Sim(step_ms=200))
    assert played.outcome == "completed"
    nodes = [event.data["node"] for event in of(played, Kind.PROCESS_SPAWNED)]
    assert nodes == [0, 0, 1, 1, 2, 2, 2, 0, 0], (
        "twice may be chance, and once elsewhere is nothing"
    )


@pytest.mark.slow
def test_eleven_simulated_losses_within_one_step(memory: Path) -> None:
    kills = [
        {
            "id": f"k{n}",
            "kind": "process-kill",
            "target": {"rank": n % 4},
            "at": {"time": 2.0 + 0.9 * n},
        }
        for n in range(11)
    ]
    cell = cell_of({"strategy": "drop-replica", "rejoin": False}, kills, ranks=24, steps=6, every=2)
    played = play(cell, memory, seed=3, sim=Sim(step_ms=1500))
    assert played.outcome == "completed"
    assert [len(e.data["members"]) for e in of(played, Kind.GENERATION_READY)] == list(
        range(24, 12, -1)
    )
    assert {e.step for e in of(played, Kind.FAILURE_DETECTED)} == {2}, "all within one step"


def test_the_limits_are_what_the_documents_say() -> None:
    assert (fallback.LOST_OUTSIDERS.free, fallback.LOST_OUTSIDERS.most_s) == (10, 600.0)
    assert (fallback.MISFITS.free, fallback.MISFITS.most_s) == (0, HOUR_S)
