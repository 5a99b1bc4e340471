"""Fault schedules: determined by scenario and seed, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.errors import ScenarioError
from chaos.scenario import FaultSpec
from chaos.schedule import (
    EVERY_ATTEMPT_LIMIT,
    NO_POINT,
    PlannedFault,
    armed,
    due_by_event,
    due_by_step,
    due_by_time,
    plan,
    repeat_seed,
)


def spec(name: str = "f", **fields: Any) -> FaultSpec:
    return FaultSpec.model_validate({"id": name, "kind": "kill", "at": {"step": 5}, **fields})


def planned(
    *faults: FaultSpec, seed: int = 1, ranks: int = 4, spares: int = 0, phases: tuple[str, ...] = ()
) -> Any:
    return plan(faults, seed=seed, ranks=ranks, spares=spares, phases_of=lambda _: phases)


def one(fault: FaultSpec, **context: Any) -> PlannedFault:
    (only,) = planned(fault, **context)
    return only  # type: ignore[no-any-return]


def test_known_plan_never_changes() -> None:
    """Stored runs are reproduced by seed: a change of these numbers breaks them all."""
    fault = one(spec("kill", at={"step": 57, "phase": "any"}), seed=17)
    assert (fault.ranks, fault.points, fault.seed) == ((1,), ((57, "collective"),), 3516460203)


@given(st.integers(0, 2**32 - 1), st.permutations(["a", "b", "c", "d"]))
def test_other_faults_and_their_order_do_not_matter(seed: int, names: list[str]) -> None:
    faults = {name: spec(name, at={"step": 5, "phase": "any"}) for name in names}
    together = planned(*(faults[name] for name in names), seed=seed)
    assert {f.id: f for f in together} == {name: one(fault, seed=seed) for name, fault in faults.items()}


def test_seeds_reach_every_target_and_phase() -> None:
    plans = [one(spec(at={"step": 5, "phase": "any"}), seed=seed) for seed in range(200)]
    assert {f.ranks for f in plans} == {(0,), (1,), (2,), (3,)}
    assert {f.points[0][1] for f in plans} == {"data", "forward", "backward", "collective", "optimizer"}


def test_phase_any_stays_within_what_the_kind_can() -> None:
    fault = spec(at={"steps": list(range(1, 50)), "phase": "any"})
    assert {phase for _, phase in one(fault, phases=("backward", "optimizer")).points} == {
        "backward",
        "optimizer",
    }
    assert one(spec(at={"step": 5, "phase": "any"}), phases=("checkpoint",)).points == ((5, "checkpoint"),)


def test_default_phase() -> None:
    assert one(spec()).points == ((5, "data"),)
    assert one(spec(), phases=("backward",)).points == ((5, "backward"),)


def test_selection() -> None:
    assert one(spec(target={"rank": 2})).ranks == (2,)
    assert one(spec(target={"replica": 3})).ranks == (3,)
    assert one(spec(target={"select": "all"})).ranks == (0, 1, 2, 3)
    assert one(spec(target={"role": "spare"}), spares=2).spares in ((0,), (1,))
    everybody = one(spec(target={"role": "any", "select": "all"}), spares=2)
    assert (everybody.ranks, everybody.spares) == ((0, 1, 2, 3), (0, 1))


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_more_selected_are_a_superset(seed: int, count: int) -> None:
    few = one(spec(target={"select": {"count": count}}), seed=seed, ranks=8).ranks
    more = one(spec(target={"select": {"count": count + 1}}), seed=seed, ranks=8).ranks
    assert len(few) == count and set(few) < set(more)


def test_checkpoint_targets_hit_no_rank() -> None:
    fault = one(spec(target={"checkpoint": {"step": 20}}))
    assert (fault.checkpoint, fault.ranks, fault.spares) == (20, (), ())
    assert one(spec(target={"checkpoint": "latest"})).checkpoint == "latest"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"role": "spare"}, "fault 'f' has no target: there is no spare to select from"),
        ({"rank": 4}, "fault 'f' has no target: there is no rank 4 among 4"),
        ({"select": {"count": 5}}, "fault 'f' has no target: cannot select 5 of 4"),
    ],
)
def test_an_empty_target_is_an_error(target: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as raised:
        planned(spec(target=target))
    assert raised.value.message == message


def test_durations_and_retrigger() -> None:
    assert one(spec(duration=2.5)).duration_s == 2.5
    assert one(spec(duration={"steps": 7})).duration_steps == 7
    fires = [one(spec(retrigger=r)).max_fires for r in ("once", {"max": 3}, "every_attempt")]
    assert fires == [1, 3, EVERY_ATTEMPT_LIMIT]


def test_armed_forgets_points_that_have_fired() -> None:
    faults = planned(spec(target={"rank": 1}, at={"steps": [9, 5]}))
    assert [f.points for f in armed(faults, 1, {})] == [((5, "data"), (9, "data"))]
    assert [f.points for f in armed(faults, 1, {("f", (5, "data")): 1})] == [((9, "data"),)]
    assert armed(faults, 1, {("f", (5, "data")): 1, ("f", (9, "data")): 1}) == ()
    assert armed(faults, 0, {}) == ()


def test_retrigger_fires_so_often_and_no_more() -> None:
    faults = planned(spec(target={"rank": 1}, retrigger={"max": 2}))
    assert armed(faults, 1, {("f", (5, "data")): 1})
    assert not armed(faults, 1, {("f", (5, "data")): 2})


def test_due_by_time() -> None:
    faults = planned(spec(at={"time": 2}), spec("other"))
    assert [f.id for f in due_by_time(faults, 2.0, {})] == ["f"]
    assert due_by_time(faults, 1.9, {}) == ()
    assert due_by_time(faults, 9.0, {("f", NO_POINT): 1}) == ()


def test_due_by_event() -> None:
    faults = planned(spec(at={"event": "restore", "nth": 2}))
    assert due_by_event(faults, "restore", 1, {}) == ()
    assert due_by_event(faults, "regroup", 2, {}) == ()
    assert [f.id for f in due_by_event(faults, "restore", 2, {})] == ["f"]
    assert due_by_event(faults, "restore", 3, {("f", NO_POINT): 1}) == ()


def test_due_by_step_is_for_those_on_no_rank() -> None:
    faults = planned(spec("spare", target={"role": "spare"}), spec("worker"), spares=1)
    assert due_by_step(faults, 3, {}) == ()
    assert [f.id for f in due_by_step(faults, 4, {})] == ["spare"]
    assert due_by_step(faults, 4, {("spare", (5, "data")): 1}) == ()


def test_repeats_have_their_own_seeds() -> None:
    seeds = [repeat_seed(17, repeat) for repeat in range(100)]
    assert seeds[0] == 17 and len(set(seeds)) == 100 and all(0 <= s < 2**32 for s in seeds)
