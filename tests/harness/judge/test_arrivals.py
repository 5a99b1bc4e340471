"""Of a fault that comes at drawn times, a report says how many of those due fired."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.pages.sample_results import build
from tests.support.search.simulate import cell_of, play
from trainchaos.chaos.events.log import read_log
from trainchaos.harness.judge.checkers.faults.due import arrivals_of
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.results import Arrivals
from trainchaos.reports import markdown
from trainchaos.reports.content.facts import tallies
from trainchaos.reports.outlets.terminal import summary

AT_ONCE: dict[str, Any] = {"id": "kill", "kind": "process-kill", "target": {"rank": 2}}


@pytest.mark.parametrize(
    ("at", "due"), [({"mtbf": 1.0}, 5), ({"weibull": {"shape": 2.0, "mean": 1.0}}, 5)], ids=str
)
def test_all_that_are_due_fire(at: dict[str, Any], due: int, tmp_path: Path) -> None:
    cell = cell_of("checkpoint-restart", [{**AT_ONCE, "at": at}], steps=120)
    arm = play(cell, tmp_path / "arm", seed=3, arm="faulted")
    found = measure(read_log(arm.directory), None)
    faults = cell.scenario.faults
    assert found.history.outcome == "completed"
    assert arrivals_of(found.history, found.episodes, faults) == {
        "kill": Arrivals(fired=due, due=due)
    }
    assert arrivals_of(found.history, found.episodes[:1], faults) == {
        "kill": Arrivals(fired=1, due=due)
    }


def test_a_fault_of_a_step_or_a_time_has_no_arrivals(tmp_path: Path) -> None:
    kills = [{**AT_ONCE, "id": "a", "at": {"step": 9}}, {**AT_ONCE, "id": "b", "at": {"time": 2.0}}]
    cell = cell_of("checkpoint-restart", kills)
    arm = play(cell, tmp_path / "arm", seed=3, arm="faulted")
    found = measure(read_log(arm.directory), None)
    assert arrivals_of(found.history, found.episodes, cell.scenario.faults) == {}


def test_reports_say_how_many_fired(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run", logs=False)
    first, second, *rest = results.arms
    told = [
        arm.model_copy(update={"arrivals": {"kill": Arrivals(fired=fired, due=due)}})
        for arm, fired, due in ((first, 1, 2), (second, 0, 2))
    ]
    results = results.model_copy(update={"arms": [*told, *rest]})
    said = "1 of 4 arrivals of kill fired"
    assert said in tallies(results) and said in summary(results, run)
    assert said in markdown.render(run, results).read_text()
