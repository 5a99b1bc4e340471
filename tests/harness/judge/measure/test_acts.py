"""One act is one incident, however many it hits, and costs what the act cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.search.simulate import Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers.faults.noticed import expectations
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.incidents import merged, outcome_of
from trainchaos.harness.judge.measure.measure import ArmMeasures, measure

THREE = {"select": {"count": 3}}
ALL = {"select": "all"}


def played(
    root: Path, *faults: dict[str, Any], recovery: Any = "checkpoint-restart", **more: Any
) -> Played:
    return play(cell_of(recovery, list(faults), **more), root, seed=3)


def kill(at: dict[str, Any], name: str = "kill", **target: Any) -> dict[str, Any]:
    return {"id": name, "kind": "process-kill", "target": target, "at": at}


def injected(found: ArmMeasures) -> int:
    return sum(1 for _ in found.history.log.of(Kind.FAULT_INJECTED))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [{"step": 33}, {"time": 1.21}], ids=["step", "time"])
@pytest.mark.parametrize("target", [THREE, ALL], ids=["three", "all"])
def test_ranks_killed_at_once_are_one_incident_that_costs_what_was_done_again(
    at: dict[str, Any], target: dict[str, Any], memory: Path
) -> None:
    one = played(memory, kill(at, **target))
    found = measure(one.log, None)
    assert injected(found) == (3 if target is THREE else 4)
    (incident,) = found.incidents
    assert incident.outcome == "recovered" and incident.landed and incident.healed
    assert len(incident.hits) == injected(found) == len(incident.target["rank"])
    assert incident.occurrences == tuple(range(injected(found)))
    redone = [run for run in found.history.runs if not run.survives and run.committed_ns]
    assert incident.steps_lost == len(redone) > 0
    for name in (
        "recovery_time",
        "steps_lost",
        "detection_time",
        "time_to_full_rate",
        "redo_time",
    ):
        assert len(found.values[name]) == 1, name
    assert found.values["steps_lost"] == [float(len(redone))]
    assert incident.recovery_time == pytest.approx(sum(span.seconds for span in incident.phases))
    assert incident.detection_time == max(hit.detection_time or 0.0 for hit in incident.hits)


@pytest.mark.slow
def test_two_acts_of_one_fault_are_two_incidents(memory: Path) -> None:
    one = played(memory, kill({"steps": [22, 47]}, **THREE))
    found = measure(one.log, None)
    assert [len(incident.hits) for incident in found.incidents] == [3, 3]
    assert [incident.step for incident in found.incidents] == [22, 47]
    assert len(found.values["recovery_time"]) == 2


def test_two_acts_of_one_step_are_told_apart_by_the_injector_alone(memory: Path) -> None:
    """Arrivals so dense that several fall between two looks: the log says that they are
    separate.
    """
    arrivals = {"trace": {"file": "inline", "times": [1.2, 1.2]}}
    slow = {"id": "slow", "kind": "process-stop", "params": {}, "at": arrivals, "duration": 0.05}
    found = measure(played(memory, slow).log, None)
    assert len(found.incidents) == injected(found) == 2


def test_a_rollback_that_answers_two_acts_has_one_number_of_steps(memory: Path) -> None:
    """The second fault cost no steps of its own: no 0 beside the rollback's number drags the median
    down.
    """
    faults = [kill({"time": 1.2}, "first", rank=1), kill({"time": 1.25}, "second", rank=2)]
    found = measure(played(memory, *faults).log, None)
    assert [incident.fault for incident in found.incidents] == ["first", "second"]
    assert [incident.answered_with for incident in found.incidents] == [None, "first"]
    assert found.values["steps_lost"] == [float(found.incidents[0].steps_lost)] != [0.0]
    assert len(found.values["recovery_time"]) == 2


@pytest.mark.slow
def test_values_that_are_spoilt_in_several_ranks_are_answered_as_one(memory: Path) -> None:
    """Only one of them is blamed; the others are no incidents that were masked."""
    nan = {"id": "nan", "kind": "tensor-corrupt", "params": {"surface": "gradient", "op": "nan"}}
    nan |= {
        "target": {"select": {"count": 2}},
        "at": {"step": 33},
        "expect": {"outcome": "recovered"},
    }
    cell = cell_of("drop-replica", [nan])
    faulted, control = play(cell, memory, seed=3), play(cell, memory, seed=3, arm="control")
    found = evidence(faulted, control)
    (incident,) = found.measures.incidents
    assert len(incident.hits) == 2 and incident.outcome in ("recovered", "degraded")
    assert expectations(found).verdict == "pass", expectations(found).witness


def test_the_worst_of_the_victims_counts() -> None:
    def of(outcome: str, detected_by: str | None = "exit") -> Incident:
        return Incident.model_construct(outcome=outcome, detected_by=detected_by)  # type: ignore[arg-type]

    assert outcome_of([of("recovered"), of("masked", None)]) == "recovered"
    assert outcome_of([of("recovered"), of("hang", None)]) == "hang", (
        "the job stood still after one was answered"
    )
    assert outcome_of([of("fail-stop"), of("hang", None)]) == "fail-stop", (
        "told of one, the job gave up"
    )
    assert outcome_of([of("fail-stop"), of("sdc-escape", None)]) == "sdc-escape"
    assert outcome_of([of("not-landed", None), of("degraded")]) == "degraded"


def test_what_is_said_of_several_victims_keeps_every_value() -> None:
    assert merged([{"rank": 1, "signal": 9}, {"rank": 2, "signal": 9}]) == {
        "rank": [1, 2],
        "signal": 9,
    }
    assert merged([{"rank": 1}, {"rank": 1, "of": "b"}]) == {"rank": 1, "of": ["b"]}
