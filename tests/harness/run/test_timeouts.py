"""What a scenario says of the supervisor's patience, and of evaluations: read with units, checked,
and passed on.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.chaos.loading.test_scenarios import validator
from tests.support.search.simulate import KILL, cell_of
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.chaos.scenario.workload import EvaluateSpec, WorkloadSpec
from trainchaos.harness.run.orchestrator import refuse_clashing, timing_of


def scenario(**timeouts: Any) -> Scenario:
    return cell_of("hot-spare", [KILL], timeouts=timeouts).scenario


def test_times_have_units_and_reach_the_supervisor() -> None:
    timing = timing_of(scenario(hang="2m", park="5s", join=400))
    assert (timing.hang.given_s, timing.park_timeout_s, timing.join_timeout_s) == (120, 5, 400)
    assert timing.form_timeout_s == 800, "torch waits longer than the supervisor"
    usual = timing_of(scenario())
    assert (usual.hang.given_s, usual.park_timeout_s, usual.join_timeout_s) == (None, 1.0, 60.0)


def test_times_that_clash_are_refused() -> None:
    with pytest.raises(ScenarioError, match="park_timeout_s"):
        refuse_clashing(scenario(park="90s"))
    refuse_clashing(scenario(park="90s", join="1h"))


def test_an_evaluation_has_units_too() -> None:
    assert EvaluateSpec.model_validate({"every": 5, "takes": "2m"}).takes == 120


def test_a_rank_of_a_sharded_model_does_not_evaluate_alone() -> None:
    with pytest.raises(ValidationError, match="rank 0 evaluates alone"):
        WorkloadSpec(kind="gpt", parallelism="fsdp", evaluate={"every": 5, "takes": 1})  # type: ignore[arg-type]


def test_a_command_has_deadlines_of_its_own() -> None:
    with pytest.raises(ValidationError, match="progress_deadline"):
        Scenario(
            version=1,
            name="x",
            workload={"command": ["train"]},
            recovery="none",
            timeouts={"hang": 5},
        )  # type: ignore[arg-type]


def test_an_editor_takes_them() -> None:
    body = {
        "version": 1,
        "name": "x",
        "recovery": "hot-spare",
        "timeouts": {"hang": "30s", "join": 100},
        "workload": {"kind": "gpt", "evaluate": {"every": 20, "takes": "8s"}},
    }
    assert list(validator().iter_errors(body)) == []
    assert list(validator().iter_errors({**body, "timeouts": {"hang": "soon"}}))
