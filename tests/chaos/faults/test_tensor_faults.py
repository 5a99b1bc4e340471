"""Wrong values in simulation: what is not finite is caught and contained, what is silent shows
where it should.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.sim.test_sim import RESTART_ALL, SPARE, STRATEGIES, found, of
from tests.support.portions import long_but
from tests.support.search.simulate import cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.plugins import FAULTS, load

SURFACES = ("parameter", "gradient", "activation", "input", "loss", "optimizer_state")


def tensor(kind: str = "tensor-corrupt", **more: Any) -> dict[str, Any]:
    """One rank, in step 33."""
    return {"id": "t", "kind": kind, "target": {"rank": 1}, "at": {"step": 33}, **more}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("op", long_but(["nan", "inf"], "nan"))
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_what_is_not_finite_is_caught_blamed_and_contained(
    surface: str, op: str, recovery: str, memory: Path
) -> None:
    fault = tensor(params={"surface": surface, "op": op}, expect={"detected_by": "nonfinite"})
    faulted, problems = found(cell_of(recovery, [fault]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert {e.data["rank"] for e in of(faulted, Kind.FAILURE_DETECTED)} == {1}


STATE = ("parameter", "optimizer_state")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("surface", [*SURFACES, "rng"])
@pytest.mark.parametrize("op", long_but(["bitflip", "scale", "stale", "zero"], "bitflip", "stale"))
def test_a_finite_corruption_is_silent_lands_and_escapes(
    surface: str, op: str, memory: Path
) -> None:
    """Of what is summed over the ranks always; of one rank's state where nobody compares."""
    if (surface, op) == ("rng", "scale"):
        return
    # The highest bit of the mantissa: the default one, of the exponent, overflows the norm of most
    # gradients.
    params: dict[str, Any] = {"surface": surface, "op": op}
    fault = tensor(params=params | ({"bit": 22} if op == "bitflip" else {}))
    compared = 0 if surface in STATE else None
    faulted, problems = found(cell_of(SPARE, [fault], verify_every=compared), memory, 3)
    assert faulted.outcome == "completed"
    assert not of(faulted, Kind.FAILURE_DETECTED)
    assert [e.data["witness"] for e in of(faulted, Kind.FAULT_LANDED)] == ["rank: tensor digests"]
    assert "loss-equality" in problems
    assert set(problems) <= {"loss-equality", "replica-equality"}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("recovery", STRATEGIES)
@pytest.mark.parametrize("surface", STATE)
@pytest.mark.parametrize("op", long_but(["bitflip", "scale", "stale", "zero"], "bitflip"))
def test_a_state_that_differs_is_named_and_replaced(
    surface: str, op: str, recovery: str, memory: Path
) -> None:
    expect = {"detected_by": "diverged", "outcome": "recovered", "blame": "rank"}
    fault = tensor(params={"surface": surface, "op": op}, expect=expect)
    faulted, problems = found(cell_of(recovery, [fault]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    (failure,) = of(faulted, Kind.FAILURE_DETECTED)
    assert (failure.step, failure.data["rank"]) == (40, 1)
    assert evidence(faulted, None).measures.values["replicas_diverged"] == [1.0]
    # The checkpoint of that step may hold the same corruption; nobody trusts it.
    saved, gone = (
        [e.step for e in of(faulted, kind) if e.generation == 1 + deletes and (e.step or 0) >= 40]
        for deletes, kind in enumerate((Kind.CHECKPOINT_COMMITTED, Kind.CHECKPOINT_SET_ASIDE))
    )
    assert gone == saved
    assert bool(saved) == (recovery != RESTART_ALL)  # it kills the rank that saves at once
    resumed = [e.step for e in of(faulted, Kind.GENERATION_READY)]
    assert resumed[1] == (30 if recovery == RESTART_ALL else 40)
    again = [e for e in of(faulted, Kind.STATE_DIGEST) if e.step == 60]
    assert len(again) == 4 and len({e.data["parameters"] for e in again}) == 1


def test_a_replica_that_drifts_is_found_at_the_next_digest(memory: Path) -> None:
    _, problems = found(cell_of(SPARE, [tensor("replica-desync")], verify_every=0), memory, 3)
    assert set(problems) == {"replica-equality", "loss-equality"}
    assert "step 40" in problems["replica-equality"]


@pytest.mark.slow
def test_replicas_compare_as_often_as_they_are_told(memory: Path) -> None:
    faulted, problems = found(cell_of(SPARE, [tensor("replica-desync")], verify_every=5), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert [e.step for e in of(faulted, Kind.FAILURE_DETECTED)] == [35]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_two_replicas_that_differ_go_back_to_where_they_agreed(recovery: str, memory: Path) -> None:
    cell = cell_of(recovery, [tensor("replica-desync")], ranks=2)
    faulted, problems = found(cell, memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    (failure,) = of(faulted, Kind.FAILURE_DETECTED)
    assert (failure.step, failure.data["process"]) == (40, None)
    (ready,) = [e for e in of(faulted, Kind.GENERATION_READY) if e.generation == 2]
    assert (ready.step, ready.data["checkpoint"]) == (30, "step-00000030")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_two_of_four_that_drift_explain_what_nobody_is_blamed_for(
    recovery: str, every: int, memory: Path
) -> None:
    """There is no majority: the one failure is the detection of both, and each of them was
    recovered.
    """
    target = {"role": "worker", "select": {"count": 2}}
    fault = tensor("replica-desync", target=target, expect={"outcome": "recovered"})
    result, problems = found(cell_of(recovery, [fault], verify_every=every), memory, 3)
    assert (result.outcome, problems) == ("completed", {})
    (failure,) = of(result, Kind.FAILURE_DETECTED)
    assert (failure.data["process"], failure.data["cause"]) == (None, "diverged")
    episodes = [episode for episode in evidence(result, None).measures.episodes if episode.injected]
    assert [episode.failure for episode in episodes] == [failure, failure]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_nobody_can_say_who_is_right_and_there_is_nothing_to_go_back_to(
    recovery: str, memory: Path
) -> None:
    fault = {**tensor("replica-desync"), "at": {"step": 3}}
    faulted = play(cell_of(recovery, [fault], ranks=2), memory, seed=3)
    assert faulted.outcome == "gave-up"
    assert (
        "no checkpoint from before they last agreed"
        in of(faulted, Kind.RUN_FINISHED)[0].data["reason"]
    )


def test_one_that_differs_again_is_replaced(memory: Path) -> None:
    faults = [
        tensor("replica-desync"),
        {**tensor("replica-desync"), "id": "again", "at": {"step": 47}},
    ]
    faulted, problems = found(cell_of(SPARE, faults), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    refilled, replaced = of(faulted, Kind.DECISION)[:2]
    assert "held another state than most" in refilled.data["reason"]
    assert "takes over from w1" in replaced.data["reason"]


def test_wrong_data_change_the_result_and_not_the_accounts(memory: Path) -> None:
    fault = tensor("data-corrupt")
    faulted, problems = found(cell_of(SPARE, [fault]), memory, 3)
    assert set(problems) == {"loss-equality"}
    assert len(of(faulted, Kind.FAULT_LANDED)) == 1


def test_a_short_stall_of_data_only_slows_the_job_down(memory: Path) -> None:
    fault = tensor(
        "data-stall", params={"delay_s": 0.2}, duration={"steps": 5}, expect={"outcome": "masked"}
    )
    faulted, problems = found(cell_of(SPARE, [fault]), memory, 3)
    assert problems == {}
    assert not of(faulted, Kind.FAILURE_DETECTED)
    assert of(faulted, Kind.FAULT_LANDED)[0].data["evidence"]["data_s"] > 0.2


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_a_long_stall_of_data_is_a_hang_of_that_rank(recovery: str, memory: Path) -> None:
    fault = tensor(
        "data-stall", params={"delay_s": 30}, duration={"steps": 5}, expect={"detected_by": "hang"}
    )
    faulted, problems = found(cell_of(recovery, [fault]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert "data of step 33" in of(faulted, Kind.FAILURE_DETECTED)[0].data["detail"]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"surface": "rng", "op": "nan"}, "the seed of random numbers is an integer"),
        ({"surface": "rng", "op": "scale"}, "the seed of random numbers is an integer"),
        ({"surface": "rng"}, "needs op bitflip, stale or zero"),
        ({"op": "nan", "bit": 3}, "bit is for op bitflip, not for nan"),
        ({"op": "bitflip", "factor": 3}, "factor is for op scale, not for bitflip"),
        ({"op": "scale", "factor": 1}, "factor 1 changes nothing"),
        ({"surface": "loss", "count": 2}, "surface loss has one element"),
    ],
)
def test_what_makes_no_sense_is_refused(params: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        load(FAULTS, Fault)["tensor-corrupt"](**params)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", STRATEGIES)
def test_an_exponent_bit_of_a_gradient_that_overflows_its_norm_is_refused(
    recovery: str, memory: Path
) -> None:
    fault = tensor(params={"op": "bitflip", "bit": 30}, expect={"detected_by": "nonfinite"})
    faulted, problems = found(cell_of(recovery, [fault]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert [e.data["cause"] for e in of(faulted, Kind.FAILURE_DETECTED)] == ["nonfinite"]
