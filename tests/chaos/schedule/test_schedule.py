"""Fault schedules: determined by scenario and seed, and by nothing else."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fault_fakes import kind_of
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.faults.process_kill import ProcessKill
from trainchaos.chaos.scenario.model import FaultSpec
from trainchaos.chaos.scenario.topology import Topology
from trainchaos.chaos.schedule.plan import (
    EVERY_ATTEMPT_LIMIT,
    PlannedFault,
    plan,
    repeat_seed,
)
from trainchaos.chaos.schedule.targeting import Scope
from trainchaos.chaos.schedule.trigger import Trigger


def spec(name: str = "f", **fields: Any) -> FaultSpec:
    return FaultSpec.model_validate({"id": name, "kind": "kill", "at": {"step": 5}, **fields})


def planned(
    *faults: FaultSpec, seed: int = 1, ranks: int = 4, spares: int = 0, phases: tuple[str, ...] = ()
) -> Any:
    scope = Scope(topology=Topology(ranks=ranks), spares=spares)
    return plan(faults, {"kill": kind_of(phases=phases)}, scope, seed)


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
    assert {f.id: f for f in together} == {
        name: one(fault, seed=seed) for name, fault in faults.items()
    }


def test_seeds_reach_every_target_and_phase() -> None:
    plans = [one(spec(at={"step": 5, "phase": "any"}), seed=seed) for seed in range(200)]
    assert {f.ranks for f in plans} == {(0,), (1,), (2,), (3,)}
    assert {f.points[0][1] for f in plans} == {
        "data",
        "forward",
        "backward",
        "collective",
        "optimizer",
    }


def test_phase_any_stays_within_what_the_kind_can() -> None:
    fault = spec(at={"steps": list(range(1, 50)), "phase": "any"})
    assert {phase for _, phase in one(fault, phases=("backward", "optimizer")).points} == {
        "backward",
        "optimizer",
    }
    assert one(spec(at={"step": 5, "phase": "any"}), phases=("checkpoint",)).points == (
        (5, "checkpoint"),
    )


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


def test_repeats_have_their_own_seeds() -> None:
    seeds = [repeat_seed(17, repeat) for repeat in range(100)]
    assert seeds[0] == 17 and len(set(seeds)) == 100 and all(0 <= s < 2**32 for s in seeds)


# --- arrivals


def test_poisson_arrivals_have_the_mean_asked_for() -> None:
    times = one(spec(at={"mtbf": 30, "max": 5000})).times_s
    gaps = [after - before for before, after in zip((0.0, *times), times, strict=False)]
    assert len(times) == 5000 and list(times) == sorted(times)
    assert statistics.fmean(gaps) == pytest.approx(30, rel=0.05)
    # exponential: as wide as its mean
    assert statistics.pstdev(gaps) == pytest.approx(30, rel=0.07)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_weibull_arrivals_have_mean_and_shape(shape: float) -> None:
    times = one(spec(at={"weibull": {"mean": 10, "shape": shape}, "max": 8000})).times_s
    gaps = [after - before for before, after in zip((0.0, *times), times, strict=False)]
    first, second = math.gamma(1 + 1 / shape), math.gamma(1 + 2 / shape)
    assert statistics.fmean(gaps) == pytest.approx(10, rel=0.07)
    assert statistics.pstdev(gaps) == pytest.approx(10 * math.sqrt(second / first**2 - 1), rel=0.1)


def test_arrivals_are_bounded_and_known() -> None:
    assert len(one(spec(at={"mtbf": 0.001})).times_s) == 100
    assert one(spec("soak", at={"mtbf": 30, "max": 3}), seed=17).times_s == KNOWN_ARRIVALS
    assert one(spec("soak", at={"mtbf": 30, "max": 2}), seed=17).times_s == KNOWN_ARRIVALS[:2]


KNOWN_ARRIVALS = (2.662711, 23.209131, 49.2688)


def test_each_arrival_draws_its_own_target() -> None:
    worn = one(spec(at={"mtbf": 30, "max": 40}))
    hit = [worn.aimed((number, "")).ranks for number in range(40)]
    assert hit[0] == worn.ranks == one(spec(at={"time": 1})).ranks
    assert {ranks for ranks in hit} == {(0,), (1,), (2,), (3,)}, (
        "a fleet does not wear out at one place"
    )
    assert [one(spec(at={"mtbf": 30, "max": 10})).aimed((n, "")).ranks for n in range(10)] == hit[
        :10
    ]
    named = one(spec(at={"mtbf": 30, "max": 5}, target={"rank": 2}))
    assert {named.aimed((number, "")).ranks for number in range(5)} == {(2,)}


def test_rows_of_steps_and_traces_of_steps() -> None:
    row = one(spec(at={"from": 10, "until": 21, "every": 5, "phase": "backward"}))
    assert row.points == ((10, "backward"), (15, "backward"), (20, "backward"))
    trace = one(spec(at={"trace": {"file": "t", "steps": [9, 3, 3]}, "phase": "optimizer"}))
    assert trace.points == ((3, "optimizer"), (9, "optimizer"))
    assert one(spec(at={"event": "data", "nth": 7})).points == ((7, "data"),)


def test_an_unread_trace_cannot_be_planned() -> None:
    with pytest.raises(ScenarioError, match="has not been read"):
        planned(spec(at={"trace": "x.csv"}))


# --- probability


def test_probability_is_decided_by_the_seed_and_recorded() -> None:
    fault = one(spec(at={"from": 1, "until": 2000, "probability": 0.25}))
    assert 420 < len(fault.points) < 580 and len(fault.points) + len(fault.declined) == 2000
    assert f"step {fault.points[0][0]}" not in fault.declined
    assert one(spec(at={"from": 1, "until": 2000, "probability": 0.25})) == fault
    assert one(spec(at={"step": 5, "probability": 0})).declined == ("step 5",)
    times = one(spec(at={"mtbf": 1, "probability": 0.5}))
    assert 30 < len(times.times_s) < 70 and len(times.times_s) + len(times.declined) == 100


def test_a_fault_by_event_that_is_declined_never_fires() -> None:
    fault = one(spec(at={"event": "regroup", "nth": 2, "probability": 0}))
    assert fault.declined == ("regroup number 2",)
    trigger = Trigger(planned=fault, fault=ProcessKill())
    assert not any(trigger.due_by_event("regroup", nth) for nth in range(1, 9))


def test_a_retriggered_event_draws_each_time() -> None:
    at = {"event": "checkpoint_committed", "probability": 0.5}
    trigger = Trigger(planned=one(spec(at=at, retrigger={"max": 200})), fault=ProcessKill())
    hits = [nth for nth in range(1, 400) if trigger.due_by_event("checkpoint_committed", nth)]
    assert 70 < len(hits) < 130 and max(hits) <= 200
