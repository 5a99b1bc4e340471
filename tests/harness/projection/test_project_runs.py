"""``chaos project`` from runs: what it takes of them, and what it says of what they lack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.projection.test_project_cli import Say, chaos, stored
from tests.harness.projection.test_project_compare import STEP_S
from tests.harness.projection.test_project_compare import stored as jobs
from trainchaos.chaos.commands import project as command
from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.judge.results import ArmResult
from trainchaos.harness.projection import observed
from trainchaos.harness.projection.observed import Stored, steady
from trainchaos.harness.projection.result import Projection
from trainchaos.reports.projection import words

__all__ = ["chaos", "stored"]  # the fixtures
pytestmark = pytest.mark.slow

LARGE = ("--preset", "llama3", "--gpus", "16384", "--trials", "8", "--days", "3", "-q")


def only(run: Stored, strategy: str) -> Stored:
    """With failures that this strategy alone recovered from."""
    cells = {cell.id for cell in run.results.cells if cell.strategy == strategy}
    faults = [one for one in run.results.faults if one.cell in cells]
    return Stored(
        path=run.path,
        results=run.results.model_copy(update={"faults": faults}),
        resolved=run.resolved,
    )


def words_of(found: Any) -> list[str]:
    """The findings of what was stored."""
    changes = ("overtakes", "is ahead of")
    lines = words.findings(Projection.model_validate(found))
    return [line for line in lines if any(text in line for text in changes)]


def give(monkeypatch: pytest.MonkeyPatch, *given: Sequence[Stored]) -> None:
    """What is read, in the order in which it is asked for."""
    answers = list(given)
    monkeypatch.setattr(observed, "read_stored", lambda paths, each, jobs: answers.pop(0))


@pytest.fixture(scope="module")
def run(stored: dict[str, str]) -> Stored:
    """One that was stored, judged once."""
    return observed.read_stored([Path(stored["kill-one-rank"])])[0]


def test_a_page_from_a_run_has_all_strategies_and_a_curve(
    chaos: Say, stored: dict[str, str], tmp_path: Path
) -> None:
    """The run's are measured, with the phases of a recovery; its first line says what is not
    known.
    """
    code, said, _ = chaos(*LARGE, "--runs", stored["kill-one-rank"])
    assert code == 0
    first, second = said.splitlines()[:2]
    assert first.startswith("caution: fewer than 5 incidents were measured of")
    assert second.startswith("caution: recoveries were measured of checkpoint-restart at 4 ranks")
    found = json.loads((tmp_path / "projection/results.json").read_text())
    for name in ("checkpoint-restart", "hot-spare", "drop-replica"):
        cost = found["costs"][name]
        assert (cost["kind"], cost["ranks"], cost["incidents"]) == ("measured", 4, 1)
        assert cost["median_s"] == pytest.approx(sum(cost["phases"].values()), rel=0.01)
        assert cost["phases"]["detect"] > 0 and cost["low_s"] is None
        assert f"detect {cost['phases']['detect']:.3g} s" in said
    assert found["costs"]["checkpoint-restart"]["redone"] == 16
    assert {point["gpus"] for point in found["curve"]} >= {16, 8192, 131_072}
    text = (tmp_path / "projection/report.html").read_text()
    assert text.index("caution") < text.index('class="caution"') + 30 < text.index("<h1")


def test_strategies_that_the_runs_lack_are_published_and_marked(
    chaos: Say,
    stored: dict[str, str],
    run: Stored,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The headline does not compare them, and a given growth is not theirs."""
    give(monkeypatch, [only(run, "hot-spare")], [])
    code, said, _ = chaos(*LARGE, "--runs", stored["kill-one-rank"], "--growth", "3s")
    assert code == 0
    assert "drop-replica (published)" in said and "hot-spare (published)" not in said
    assert "must not be compared with what was measured of hot-spare" in said
    found = json.loads((tmp_path / "projection/results.json").read_text())
    kinds = {name: cost["kind"] for name, cost in found["costs"].items()}
    assert not any("published" in line for line in words_of(found)), "nor do the findings"
    assert kinds == {
        "checkpoint-restart": "published",
        "hot-spare": "measured",
        "drop-replica": "published",
    }
    stalls = {row["strategy"]: row["stall_s"] for row in found["rows"]}
    assert stalls["checkpoint-restart"] == pytest.approx(768.0)
    assert stalls["hot-spare"] == pytest.approx(found["costs"]["hot-spare"]["median_s"] + 33.0)
    text = (tmp_path / "projection/report.html").read_text()
    headline = text[text.index("<h1") : text.index("</h1>")]
    assert "hot-spare keeps" in headline and "checkpoint-restart" not in headline


def test_step_and_save_are_those_of_the_control_arms(
    chaos: Say,
    stored: dict[str, str],
    run: Stored,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    give(monkeypatch, [run], [], [run], [])
    options = (*LARGE, "--runs", stored["kill-one-rank"], "--times-of-runs")
    code, _, _ = chaos(*options, "--save", "2ms")
    said = json.loads((tmp_path / "projection/results.json").read_text())["setting"]
    step_s, _ = steady([run])
    controls = [one for one in run.results.arms if one.arm == "control"]
    assert min(one.step_time_median or 0 for one in controls) <= step_s <= 0.2
    assert code == 0 and (said["step_s"], said["save_s"], said["load_s"]) == (step_s, 0.002, 120.0)
    assert said["loads_measured"], "of published costs it is still 120 s"
    found = json.loads((tmp_path / "projection/results.json").read_text())
    restart = next(row for row in found["rows"] if row["strategy"] == "checkpoint-restart")
    assert restart["badput"]["restart"] == 0.0
    assert "checkpoint-restart has its loading in it; none is added" in " ".join(found["notes"])
    _, text, _ = chaos(*LARGE, "--runs", stored["kill-one-rank"])
    assert "loading takes 120 s beside what was measured of checkpoint-restart" in text


def saving(run: Stored, seconds: float, **more: Any) -> Stored:
    """Each control arm saves for so long in all; a fifth of what is provisioned is a spare."""

    def changed(one: ArmResult) -> ArmResult:
        if one.arm != "control":
            return one
        badput = {**one.badput, "checkpoint_save": seconds * 0.8}
        return one.model_copy(update={"badput": badput, "steps": 800, **more})

    arms = [changed(one) for one in run.results.arms]
    return Stored(
        path=run.path,
        results=run.results.model_copy(update={"arms": arms}),
        resolved=run.resolved,
    )


def test_what_a_save_holds_up_is_by_their_number() -> None:
    """A checkpoint each 40 of 800 steps: 20 of them."""
    run = jobs("hot-spare", repeats=2)
    assert steady([saving(run, 5.0)]) == pytest.approx((STEP_S / 0.9, 0.25), rel=0.12)
    cell = run.resolved.cells[0]
    workload = cell.scenario.workload
    checkpoint = workload.checkpoint.model_copy(update={"every": "30s"})
    timed = cell.scenario.model_copy(
        update={"workload": workload.model_copy(update={"checkpoint": checkpoint})}
    )
    resolved = run.resolved.model_copy(
        update={"cells": [cell.model_copy(update={"scenario": timed})]}
    )
    with pytest.raises(ScenarioError, match="each 30s, so that their number is not known"):
        steady([Stored(path=run.path, results=run.results, resolved=resolved)])
    with pytest.raises(ScenarioError, match="no control arm of the runs says"):
        steady([saving(run, 5.0, outcome="failed")])


def test_a_comparison_alone_projects_nothing_else(
    chaos: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: dict[str, str]
) -> None:
    """An unrelated cluster beside it would only confuse."""
    here = stored["kill-one-rank"]
    give(monkeypatch, [], [jobs("hot-spare")])
    code, said, _ = chaos("--compare", here, "-q")
    assert code == 0 and "16384" not in said and "1 of 1 jobs are within" in said
    text = (tmp_path / "projection/report.html").read_text()
    assert "1 of 1 jobs were where they are projected to be" in text
    assert text.count('<svg class="strip-row"') == 1 and "All in all" not in text
    give(monkeypatch, [], [jobs("hot-spare")])
    code, said, _ = chaos("--compare", here, *LARGE)
    assert code == 0 and "16384" in said and "1 of 1 jobs are within" in said


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each share that is told."""
    now = iter([0.0, 1.0, 10.5, 10.5, 11.0, 21.0, 21.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(now))
    told = command._lines_of("projecting")
    for share in (0.1, 0.25, 0.3, 0.5):
        told(share)
    assert capsys.readouterr().err.splitlines() == ["projecting: 25%", "projecting: 50%"]
