"""Triggers, targets, limits and expectations played in simulation, and how they are judged."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.search.simulate import (
    IN_MEMORY,
    KILL,
    Played,
    cell_of,
    control_of,
    evidence,
    play,
)
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.harness.judge.checkers import check_all
from trainchaos.harness.judge.checkers.faults import due
from trainchaos.harness.judge.record.episode import Episode

PLAIN = "checkpoint-restart"


def arm(memory: Path, fault: dict[str, Any], recovery: Any = PLAIN, **more: Any) -> Played:
    root = memory / str(len(list(memory.iterdir())))
    return play(cell_of(recovery, [{**KILL, **fault}], **more), root, seed=5)


@cache
def usual() -> Played:
    """The usual arm, of which what is only judged may be any."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as root:
        return play(cell_of(PLAIN, [KILL]), Path(root), seed=5)


def judged_by(fault: dict[str, Any], **more: Any) -> Played:
    return replace(usual(), cell=cell_of(PLAIN, [{**KILL, **fault}], **more))


def findings(played: Played) -> dict[str, tuple[str, str]]:
    control = control_of(played.cell, seed=5)
    return {
        name: (f.verdict, f.witness) for name, f in check_all(evidence(played, control)).items()
    }


def injected(played: Played) -> list[Event]:
    return list(played.log.of(Kind.FAULT_INJECTED))


# --- one act


def test_a_majority_dies_in_one_act(memory: Path) -> None:
    played = arm(memory, {"target": {"select": "majority"}})
    events = injected(played)
    assert len(events) == 3 and {event.step for event in events} == {33}
    assert not any(
        e.kind is Kind.FAILURE_DETECTED
        for e in played.log.events
        if events[0].time_ns <= e.time_ns <= events[-1].time_ns
    )
    assert played.outcome == "completed" and findings(played)["fault-landed"][0] == "pass"


def test_spares_are_hit_in_the_same_act(memory: Path) -> None:
    played = arm(
        memory, {"target": {"role": "any", "select": "all"}}, {"strategy": "hot-spare", "spares": 2}
    )
    events = injected(played)
    assert len(events) == 6 and events[-1].time_ns - events[0].time_ns < 1_000_000
    assert played.outcome == "completed"


def test_a_rack_is_lost_together(memory: Path) -> None:
    launcher = {"kind": "sim", "nodes": 2, "nodes_per_rack": 1}
    played = arm(memory, {"target": {"rack": 1, "select": "all"}}, launcher=launcher)
    assert {event.data["target"]["rank"] for event in injected(played)} == {2, 3}
    (planned,) = played.log.of(Kind.FAULT_PLANNED)
    assert planned.data["target"]["ranks"] == [2, 3]


# --- arrivals and probability


def test_arrivals_strike_again_and_again(memory: Path) -> None:
    played = arm(memory, {"at": {"trace": {"file": "t", "times": [0.4, 0.9]}}}, "hot-spare")
    assert len(injected(played)) == 2 and findings(played)["fault-landed"][0] == "pass"


def test_arrivals_after_the_end_do_not_count(memory: Path) -> None:
    played = arm(memory, {"at": {"trace": {"file": "t", "times": [0.5, 900.0]}}})
    assert len(injected(played)) == 1 and findings(played)["fault-landed"][0] == "pass"


@pytest.mark.parametrize(
    ("at", "reason", "landed", "excuse"),
    [
        ({"mtbf": 3}, "the run ended before an effect was seen", True, True),
        ({"mtbf": 3}, "the run ended before an effect was seen", False, False),
        ({"mtbf": 3}, "no evidence within 15 s", True, False),
        ({"step": 3}, "the run ended before an effect was seen", True, False),
    ],
)
def test_an_arrival_at_the_very_end_is_excused(
    at: dict[str, Any], reason: str, landed: bool, excuse: bool
) -> None:
    fault = FaultSpec.model_validate({**KILL, "at": at})
    late: Any = SimpleNamespace(
        fault="kill", landed=None, failed=SimpleNamespace(data={"reason": reason})
    )
    earlier: Any = SimpleNamespace(fault="kill", landed="seen" if landed else None, failed=None)
    measures = SimpleNamespace(episodes=[earlier, late])
    seen: Any = SimpleNamespace(fault=lambda name: fault, measures=measures)
    assert due.excused(seen, late) == excuse


def test_no_arrival_at_all_is_inconclusive(memory: Path) -> None:
    verdict, witness = findings(arm(memory, {"at": {"mtbf": 1e6}}))["fault-landed"]
    assert (
        verdict == "inconclusive"
        and "kill was first due" in witness
        and "training lasted" in witness
    )


def test_a_probability_that_rules_everything_out_is_inconclusive(memory: Path) -> None:
    played = arm(memory, {"at": {"steps": [20, 30], "probability": 0}})
    verdict, witness = findings(played)["fault-landed"]
    assert not injected(played) and verdict == "inconclusive" and "ruled all of them out" in witness


def test_what_the_probability_left_is_all_that_is_due(memory: Path) -> None:
    played = arm(
        memory, {"at": {"from": 12, "until": 40, "every": 4, "probability": 0.3}}, "hot-spare"
    )
    (planned,) = played.log.of(Kind.FAULT_PLANNED)
    points, declined = planned.data["at"]["points"], planned.data["at"]["declined"]
    assert len(points) + len(declined) == 8 and len(injected(played)) == len(points) > 0
    assert findings(played)["fault-landed"][0] == "pass"


def test_hit_again_as_soon_as_it_has_recovered(memory: Path) -> None:
    again = {**KILL, "id": "again", "target": {"rank": 1}, "at": {"event": "recovered"}}
    cell = cell_of({"strategy": "hot-spare", "spares": 2}, [KILL, again])
    first, second = injected(play(cell, memory, seed=5))
    assert (first.data["fault"], second.data["fault"]) == (
        "kill",
        "again",
    ) and first.generation != second.generation


@pytest.mark.slow
def test_one_that_acts_again_before_it_is_over_ends_with_the_later(memory: Path) -> None:
    """Ended with the first, the disk could be written for the rest of the second."""
    full = {"kind": "read-only", "target": {}, "at": {"steps": [9, 14]}, "duration": {"steps": 8}}
    played = arm(memory, full, "drop-replica", steps=40, every=2)
    first, second = played.log.of(Kind.FAULT_HEALED)
    assert "left to occurrence 1" in first.data["how"] and "left to" not in second.data["how"]
    assert findings(played)["landing"] == ("pass", "2 derived again from the log")


@pytest.mark.slow
def test_what_is_over_before_it_could_show_is_said_to_be_however_long_the_job_goes_on(
    memory: Path,
) -> None:
    """A disk that is broken for steps in which nobody saves."""
    broken = {"kind": "io-error", "at": {"step": 3}, "duration": {"steps": 4}}
    aimed = {**broken, "target": {"rank": 0}}
    played = arm(memory, aimed, "drop-replica", ranks=2, steps=600, every=400)
    (failed,) = played.log.of(Kind.FAULT_FAILED)
    (finished,) = played.log.of(Kind.RUN_FINISHED)
    assert "it was over before an effect was seen" in failed.data["reason"]
    assert finished.time_ns - failed.time_ns > 1e9  # no end of the run ended the wait


def test_a_disk_so_slow_that_the_rank_is_taken_for_hung_is_seen(memory: Path) -> None:
    slow = {"kind": "io-slow", "at": {"step": 3}, "params": {"delay_s": 8.0}, "target": {"rank": 0}}
    played = arm(memory, {**slow, "duration": {"steps": 8}}, "drop-replica", steps=20, every=4)
    (landed,) = played.log.of(Kind.FAULT_LANDED)
    assert "in checkpoint of step 4" in landed.data["evidence"]["detail"]
    assert findings(played)["landing"][0] == "pass"


@pytest.mark.slow
def test_slow_steps_have_the_time_to_show_it(memory: Path) -> None:
    """A step over the throttled link takes four seconds, and five of them more than the 15 s of
    other evidence.
    """
    slow = {
        "kind": "link-throttle",
        "target": {"rank": 0},
        "at": {"step": 6},
        "duration": {"steps": 10},
    }
    played = arm(memory, {**slow, "params": {"mbit_per_s": 1.42}}, ranks=4, steps=30)
    assert len(list(played.log.of(Kind.FAULT_LANDED))) == 1


@pytest.mark.parametrize(
    ("kind", "failed", "failure", "lasts"),
    [
        ("link-throttle", None, None, True),
        # whoever is blamed is replaced, and the link is as slow as before
        ("link-throttle", None, 20, True),
        ("straggler", None, 20, False),
        # nobody saw its effect in time, and it acted until it was healed
        ("straggler", 30, None, True),
        # nor when it was over, which says nothing of the steps until then
        ("straggler", 90, None, True),
    ],
)
def test_how_long_a_fault_acts(
    kind: str, failed: int | None, failure: int | None, lasts: bool
) -> None:
    def at(time: int | None, kind: Kind, **data: Any) -> Event | None:
        return time and Event(
            kind=kind, actor="orchestrator", seq=0, time_ns=time, generation=1, step=None, data=data
        )

    episode = Episode(
        fault="f",
        kind=kind,
        occurrence=0,
        target={},
        process="w0",
        rank=0,
        planned=at(1, Kind.FAULT_PLANNED, lasts=True),
        injected=at(10, Kind.FAULT_INJECTED),
        landed=None,
        failed=at(failed, Kind.FAULT_FAILED),
        healed=at(80, Kind.FAULT_HEALED),
        failure=at(failure, Kind.FAILURE_DETECTED),
    )
    assert episode.lasts_over(40, 50) == lasts and not episode.lasts_over(81, 90)


# --- limits


def test_the_blast_radius_holds_back_what_would_be_too_much(memory: Path) -> None:
    fault = {"at": {"trace": {"file": "t", "times": [0.5, 0.505]}}}
    played = arm(memory, fault, blast_radius={"max_concurrent_faults": 1})
    (refused,) = played.log.of(Kind.FAULT_FAILED)
    assert len(injected(played)) == 1 and refused.data["reason"].startswith(
        "not fired: blast_radius allows 1"
    )
    assert findings(played)["fault-landed"][0] == "pass"  # an arrival among others


def test_a_planned_fault_held_back_is_inconclusive(memory: Path) -> None:
    second = {**KILL, "id": "second", "target": {"rank": 1}}
    cell = cell_of(PLAIN, [KILL, second], blast_radius={"min_healthy_replicas": 3})
    verdict, witness = findings(play(cell, memory, seed=5))["fault-landed"]
    assert (
        verdict == "inconclusive"
        and "was not fired: not fired" not in witness
        and "blast_radius keeps 3" in witness
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("when", "outcome"),
    [("healthy_replicas < 4", "halted"), ("failures > 0", "halted"), ("failures > 5", "completed")],
)
def test_stop_conditions_halt(memory: Path, when: str, outcome: str) -> None:
    assert arm(memory, {}, stop_conditions=[{"when": when}]).outcome == outcome


def test_a_non_finite_loss_halts(memory: Path) -> None:
    fault = {"kind": "tensor-corrupt", "params": {"surface": "gradient", "op": "nan"}}
    assert arm(memory, fault, stop_conditions=[{"when": "loss_nonfinite"}]).outcome == "halted"


# --- steady state and expectations


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        ("committed_steps >= 30", "pass"),
        ("committed_steps >= 40", "inconclusive"),
        ("committed_steps >= 30 within 1ms", "inconclusive"),
        ("step_time_cv < 0.5 over 10 steps", "pass"),
        ("step_time_cv < 0.5 over 50 steps", "inconclusive"),
        ("step_time_cv < 0 over 10 steps", "inconclusive"),
        ("healthy_replicas >= 4", "pass"),
        ("healthy_replicas >= 5", "inconclusive"),
    ],
)
def test_steady_state_before_the_first_fault(check: str, verdict: str) -> None:
    found = findings(judged_by({}, steady_state=[check]))["steady-state"]
    assert found[0] == verdict and check in found[1]


@pytest.mark.parametrize(
    ("expect", "verdict"),
    [
        ({"blame": "rank"}, "pass"),
        ({"blame": "none"}, "fail"),
        ({"outcome": "recovered", "blame": "rank"}, "pass"),
    ],
)
def test_expected_blame(expect: dict[str, Any], verdict: str) -> None:
    assert findings(judged_by({"expect": expect}))["expectation"][0] == verdict


@pytest.mark.slow
def test_an_expected_smaller_world(memory: Path) -> None:
    recovery = {"strategy": "drop-replica", "rejoin": False}
    assert (
        findings(arm(memory, {"expect": {"outcome": "degraded"}}, recovery))["expectation"][0]
        == "pass"
    )
    assert findings(judged_by({"expect": {"outcome": "degraded"}}))["expectation"][0] == "fail"


@pytest.mark.slow
def test_evidence_must_meet_verify(memory: Path) -> None:
    assert findings(arm(memory, {"verify": {"signal": 9}}))["fault-landed"][0] == "pass"
    verdict, witness = findings(arm(memory, {"verify": {"signal": 15}}))["fault-landed"]
    assert verdict == "inconclusive" and "signal is 9, and must be 15" in witness
