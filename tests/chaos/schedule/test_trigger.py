"""A trigger: where ranks hold for its fault, when it is due, and what makes it pending again."""

from __future__ import annotations

from typing import Any

import pytest

from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.faults.coordinator_kill import CoordinatorKill
from trainchaos.chaos.faults.disk_full import DiskFull
from trainchaos.chaos.faults.exception import RaiseError
from trainchaos.chaos.faults.poison_sample import PoisonSample
from trainchaos.chaos.faults.process_kill import ProcessKill
from trainchaos.chaos.faults.tensor_corrupt import TensorCorrupt
from trainchaos.chaos.scenario.model import FaultSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.plan import NEXT_STEP, NO_POINT, Point, plan
from trainchaos.chaos.schedule.targeting import Scope
from trainchaos.chaos.schedule.trigger import Trigger, triggers

FIVE: Point = (5, "data")
NINE: Point = (9, "data")
RANKS = range(4)
FOUR = Topology(ranks=4)


def of(fault: Fault, spares: int = 1, **fields: Any) -> Trigger:
    """The trigger of a fault of four ranks, due at step 5 unless it is said."""
    kind = type(fault)
    spec = FaultSpec.model_validate({"id": "f", "kind": "k", "at": {"step": 5}, **fields})
    (planned,) = plan([spec], {"k": kind}, Scope(topology=FOUR, spares=spares), 1)
    return Trigger(planned=planned, fault=fault)


# --- where ranks hold


def test_a_point_that_has_fired_on_a_rank_is_armed_no_more() -> None:
    trigger = of(ProcessKill(), target={"rank": 1}, at={"steps": [9, 5]})
    assert trigger.arm(1) == (FIVE, NINE) and trigger.arm(0) == ()
    trigger.fire_on(FIVE, [1])
    assert trigger.arm(1) == (NINE,) and trigger.has_fired(FIVE, 1)
    trigger.fire_on(NINE, [1])
    assert trigger.arm(1) == ()


def test_retrigger_fires_so_often_and_no_more() -> None:
    trigger = of(ProcessKill(), target={"rank": 1}, retrigger={"max": 2})
    trigger.fire_on(FIVE, [1])
    assert trigger.arm(1)
    trigger.fire_on(FIVE, [1])
    assert not trigger.arm(1)


def test_a_fault_holds_where_it_can_act() -> None:
    trigger = of(TensorCorrupt(), target={"rank": 1})
    (at,) = trigger.arm(1)
    assert at == trigger.acts_at(trigger.planned.points[0])
    assert trigger.planned_at(at) == trigger.planned.points[0]
    assert trigger.planned_at((6, at[1])) is None
    assert trigger.holders(at, RANKS) == {1}


def test_all_ranks_hold_for_what_is_no_ranks_until_it_fires() -> None:
    trigger = of(DiskFull(), duration=1.0)
    assert trigger.held_by_all and not of(CoordinatorKill()).held_by_all
    assert trigger.holders(FIVE, RANKS) == set(RANKS)
    trigger.fire(FIVE, attempt=1)
    assert trigger.holders(FIVE, RANKS) == set()


def test_a_hold_keeps_its_number_and_ends_with_go() -> None:
    trigger = of(ProcessKill(), target={"select": "all"})
    trigger.at_point(FIVE, 0, "w0", number=7, now_ns=70)
    trigger.at_point(FIVE, 1, "w1", number=8, now_ns=80)
    hold = trigger.holds[FIVE]
    assert (hold.number, hold.since_ns, hold.processes) == (7, 70, {0: "w0", 1: "w1"})
    trigger.leave(FIVE, 1)
    trigger.leave(FIVE, None)
    trigger.leave(NINE, 0)
    assert trigger.holds[FIVE].processes == {0: "w0"}
    trigger.go(FIVE)
    assert not trigger.holds


def test_whoever_leaves_with_a_generation_holds_no_more() -> None:
    trigger = of(ProcessKill(), target={"select": "all"})
    trigger.at_point(FIVE, 0, "w0", number=0, now_ns=0)
    trigger.disperse()
    assert not trigger.holds


# --- when it is due


def test_due_by_time() -> None:
    trigger = of(ProcessKill(), at={"time": 2})
    assert trigger.due_by_time(1.9) == ()
    assert trigger.due_by_time(2.0) == ((0, ""),)
    trigger.fire((0, ""), attempt=1)
    assert trigger.due_by_time(9.0) == ()
    assert of(ProcessKill()).due_by_time(9.0) == ()


def test_each_arrival_fires_once() -> None:
    trigger = of(ProcessKill(), at={"trace": {"file": "t", "times": [4, 1, 2]}})
    assert trigger.due_by_time(0.5) == ()
    assert trigger.due_by_time(2.5) == ((0, ""), (1, ""))
    trigger.fire((0, ""), attempt=1)
    assert trigger.due_by_time(2.5) == ((1, ""),)
    trigger.fire((1, ""), attempt=1)
    assert trigger.due_by_time(3.0) == ()


def test_due_by_event() -> None:
    trigger = of(ProcessKill(), at={"event": "restore", "nth": 2})
    assert not trigger.due_by_event("restore", 1)
    assert not trigger.due_by_event("regroup", 2)
    assert trigger.due_by_event("restore", 2)
    trigger.fire(NO_POINT, attempt=1)
    assert not trigger.due_by_event("restore", 3)


def test_due_by_step_is_for_those_on_no_rank() -> None:
    trigger = of(ProcessKill(), target={"role": "spare"})
    assert trigger.due_by_step(3) == ()
    assert trigger.due_by_step(4) == (FIVE,)
    trigger.fire(FIVE, attempt=1)
    assert trigger.due_by_step(4) == ()
    assert of(ProcessKill()).due_by_step(4) == ()


def test_it_remembers_the_attempt_it_fired_in() -> None:
    trigger = of(DiskFull(), duration=1.0, retrigger={"max": 2})
    assert not trigger.fired_in(FIVE, 0)
    trigger.fire(FIVE, attempt=1)
    assert trigger.fired_in(FIVE, 1) and not trigger.fired_in(FIVE, 2)


# --- the next step of a rank, and acts that came to nothing


@pytest.mark.parametrize(
    ("fault", "phase"), [(RaiseError(), "data"), (TensorCorrupt(), "collective")]
)
def test_ranks_hold_in_their_next_step_where_no_step_was_named(fault: Fault, phase: str) -> None:
    trigger = of(fault, at={"time": 1}, target={"rank": 2})
    assert trigger.arm(2) == trigger.arm_next_step(2) == ()
    trigger.wait_for_next_step((2,), act=3)
    assert trigger.arm_next_step(2) == ((NEXT_STEP, phase),) and trigger.arm_next_step(1) == ()
    assert trigger.take_next_step((2,)) and not trigger.take_next_step((2,))
    assert trigger.arm_next_step(2) == ()


def test_an_act_goes_on_with_those_that_waited_for_it() -> None:
    trigger = of(RaiseError(), at={"time": 1}, target={"select": "all"})
    trigger.wait_for_next_step(RANKS, act=3)
    assert [trigger.act_of([rank], new) for new, rank in enumerate(RANKS, 3)] == [3, 3, 3, 3]
    assert trigger.act_of([0], 7) == 7


def test_a_firing_that_never_acted_is_pending_again() -> None:
    trigger = of(RaiseError(), target={"rank": 2})
    trigger.fire_on(FIVE, [2])
    trigger.again(FIVE, 2, act=0)
    assert trigger.arm(2) == (FIVE,) and not trigger.has_fired(FIVE, 2)
    assert trigger.act_of([2], 1) == 0, "it is still that act"
    trigger.again(None, 2, act=1)
    assert trigger.arm_next_step(2)


def test_a_hold_that_lost_all_its_ranks_is_known_at_the_end() -> None:
    trigger = of(ProcessKill(), target={"rank": 1})
    at = trigger.acts_at(FIVE)
    trigger.at_point(at, 1, "w1", number=0, now_ns=0)
    trigger.go(at)
    trigger.go_in_vain(at)
    assert trigger.was_let_go(FIVE) and trigger.never_fired() == [FIVE]
    assert trigger.arm(1) == (FIVE,), "whoever takes the rank may come there again"


def test_only_the_first_firing_at_a_point_hits_spares_too() -> None:
    trigger = of(ProcessKill(), target={"role": "any", "select": "all"}, at={"steps": [9, 5]})
    assert trigger.fire_on(FIVE, [1]) and not trigger.fire_on(FIVE, [2])
    trigger.again(FIVE, 1, act=0)
    trigger.again(FIVE, 2, act=0)
    assert not trigger.fire_on(FIVE, [1, 2]), "its spares were hit, and are not armed again"
    assert trigger.fire_on(NINE, [1])


def test_what_was_not_there_and_never_fired_is_known_at_the_end() -> None:
    trigger = of(ProcessKill(), target={"role": "spare"}, at={"steps": [9, 5]})
    for point in (NINE, FIVE):
        trigger.not_there(point)
    assert trigger.was_not_there(NINE) and trigger.never_fired() == [FIVE, NINE]
    trigger.fire(FIVE, attempt=1)
    assert trigger.never_fired() == [NINE]


def test_what_acts_everywhere_hits_all_ranks() -> None:
    kinds = {"poison-sample": PoisonSample, "process-kill": ProcessKill}
    specs = [
        FaultSpec.model_validate({"id": kind, "kind": kind, "at": {"step": 5}}) for kind in kinds
    ]
    planned = plan(specs, kinds, Scope(topology=FOUR), 1)
    poison, kill = triggers(planned, kinds, ranks=4)
    assert poison.planned.ranks == (0, 1, 2, 3) and len(kill.planned.ranks) == 1
    assert (poison.id, type(poison.fault)) == ("poison-sample", PoisonSample)
