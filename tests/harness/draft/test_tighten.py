"""Limits tightened to what a run observed: which, by how much, and of which runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands.unreported import unreported
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import EXIT_PASS, EXIT_USAGE
from trainchaos.chaos.scenario.sla import parse_clause
from trainchaos.harness.draft.findings import FEW_STEPS
from trainchaos.harness.draft.tighten import clause_in, edited, tightened
from trainchaos.harness.judge.results import Results

TRAINER = Path(__file__).parents[2] / "support" / "fakes" / "fake_trainer.py"
SCENARIO = f"""# mine
version: 1
name: mine
workload:
  command: [{sys.executable}, {TRAINER}, launch, --steps, "30", --save-every, "14", --restarts, "2"]
  ranks: 2  # the fake
  steps: 30
  progress: {{regex: 'step (?P<step>\\d+) loss (?P<loss>[0-9.]+)'}}
faults: [{{id: hit, kind: process-kill, target: {{rank: 1}}, at: {{step: 18}}}}]
baseline: none
invariants: observable
sla:
  recovery_time: ["max < 300s"]  # generous
  steps_lost:
    - 'max <= 29'   # as well
    - {{check: "median < 28", severity: warn}}
  goodput: ["min > 0.001"]
  detection_time: ["max < 1us"]
"""
LOOSE = SCENARIO.replace('  detection_time: ["max < 1us"]\n', "")
FORGETS = (
    LOOSE.replace("name: mine", "name: forgets")
    .replace('--restarts, "2"', '--restarts, "2", --save-every, "99"')
    .replace("invariants: observable", "invariants: [kept-progress]")
    .replace('  goodput: ["min > 0.001"]\n', "")
)


@pytest.mark.parametrize(
    ("text", "metric", "cells", "new"),
    [
        ("max < 300s", "recovery_time", [[4.1, 2.0], [7.3]], "max < 15s"),
        ("max < 300s", "recovery_time", [[0.031]], "max < 0.07s"),
        ("max < 300s", "recovery_time", [[0.0]], "max < 0.001s"),
        ("median < 300s", "recovery_time", [[1.0, 9.0, 2.0], [3.0]], "median < 10s"),
        ("max < 10s", "recovery_time", [[5.1]], None),
        ("max < 300s", "recovery_time", [[float("inf")]], None),
        ("max < 300s", "recovery_time", [], None),
        ("max < 300 steps", "recovery_time", [[4.1, 2.0], [7.3]], "max < 15 steps"),
        ("max < 300 steps", "recovery_time", [[0.0]], "max < 1 steps"),
        ("max < 14.5 steps", "recovery_time", [[7.3]], None),
        ("max <= 25", "steps_lost", [[3.0], [7.0]], "max <= 14"),
        ("max < 25", "steps_lost", [[3.0], [7.0]], "max < 14"),
        ("max <= 7", "steps_lost", [[7.0]], None),
        ("max <= 13", "steps_lost", [[7.0]], None),
        ("max == 7", "steps_lost", [[7.0]], None),
        ("min > 0.1", "goodput", [[0.84], [0.66]], "min > 0.3"),
        ("min > 0.4", "goodput", [[0.66]], None),
    ],
)
def test_a_limit_is_tightened_and_never_loosened(
    text: str, metric: str, cells: list[list[float]], new: str | None
) -> None:
    unit = {"recovery_time": "s", "steps_lost": "steps", "goodput": "ratio"}[metric]
    got, why = tightened(parse_clause(text, unit), cells)
    assert got == new
    count = sum(map(len, cells))
    assert (f"of {count} observed" if count else "nothing was observed") in why


def test_clauses_are_found_where_they_stand() -> None:
    places = [clause_in(SCENARIO, "recovery_time", 0), clause_in(SCENARIO, "steps_lost", 1)]
    assert [one.text for one in places if one] == ["max < 300s", "median < 28"]
    assert all(one and one.text in SCENARIO.split("\n")[one.line][one.column :] for one in places)
    assert (
        clause_in(SCENARIO, "steps_lost", 2) is None and clause_in("[1]", "steps_lost", 0) is None
    )
    assert clause_in(SCENARIO, "step_time", 0) is None


def test_two_clauses_of_one_line_are_replaced_each_at_itsclause_in() -> None:
    text = 'sla: {steps_lost: ["max < 9", "max < 99"], goodput: ["min > 0.1"]}  # max < 9\n'
    places = [clause_in(text, "steps_lost", 0), clause_in(text, "steps_lost", 1)]
    edits = [
        (one, new) for one, new in zip(places, ("max < 111111", "max < 2"), strict=True) if one
    ]
    assert edited(text, edits) == text.replace('"max < 9"', '"max < 111111"').replace("99", "2")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with scenarios of which one has failed, the others passed, and their runs."""
    folder = tmp_path_factory.mktemp("played")
    texts = {
        "mine": LOOSE,
        "other": SCENARIO.replace("name: mine", "name: other"),
        "forgets": FORGETS,
        "behind": LOOSE.replace("name: mine", "name: behind").replace("step: 18", "step: 16"),
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
        code = invoke(["run", str(folder / f"{name}.yaml"), "--runs", str(folder / "runs"), "-q"])
        assert code == (1 if name == "other" else 0)
    yield folder


@pytest.mark.real
def test_the_limits_of_a_run_that_passed(played: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = played / "mine.yaml"
    source.write_text(LOOSE)
    assert invoke(["init", "--from", str(played / "runs/mine/latest")]) == EXIT_PASS
    said = capsys.readouterr().out
    text = source.read_text()
    changed = [
        (old, new)
        for old, new in zip(LOOSE.split("\n"), text.split("\n"), strict=True)
        if old != new
    ]
    assert [old.split(":")[0].strip(" -'") for old, _ in changed] == [
        "recovery_time",
        "max <= 29'   # as well",
        "{check",
        "goodput",
    ]
    assert "# generous" in changed[0][1] and "# as well" in changed[1][1]
    assert "max < 300s -> max < " in said and "(" in said and "1 observed" in said
    assert invoke(["validate", str(source)]) == EXIT_PASS
    assert invoke(["init", "--from", str(played / "runs/mine/latest")]) == EXIT_PASS
    assert "nothing to tighten" in capsys.readouterr().out and source.read_text() == text


@pytest.mark.real
def test_no_limit_is_made_of_a_job_that_began_again(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["init", "--from", str(played / "runs/forgets/latest")]) == EXIT_PASS
    said = capsys.readouterr().out
    assert "stays: the job began again from step 1 after hit in default, repeat 0" in said
    text = (played / "forgets.yaml").read_text()
    assert "max <= 29" in text and "max < 300s" not in text


@pytest.mark.real
def test_no_limit_is_made_of_a_fault_behind_a_checkpoint_in_a_run(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = played / "runs/behind/latest/results.json"
    (incident,) = Results.model_validate_json(path.read_text()).faults
    assert invoke(["init", "--from", str(path.parent)]) == EXIT_PASS
    behind = incident.steps_lost <= FEW_STEPS  # on a busy machine the kill may come steps later
    assert (f"stays: at step {incident.step} next to nothing" in capsys.readouterr().out) is behind
    text = (played / "behind.yaml").read_text()
    assert ("max <= 29" in text) is behind and "max < 300s" not in text


@pytest.mark.real
def test_another_file_is_written_when_it_is_named(played: Path) -> None:
    (played / "mine.yaml").write_text(LOOSE)
    out = played / "tight.yaml"
    arguments = ["init", "--from", str(played / "runs/mine/latest"), "--out", str(out)]
    assert invoke(arguments) == EXIT_PASS
    assert out.read_text() != LOOSE and (played / "mine.yaml").read_text() == LOOSE
    out.unlink()


@pytest.mark.real
@pytest.mark.parametrize(
    ("run", "spoil", "words"),
    [
        ("other", "", "its verdict is fail"),
        ("mine", "steps: 30|steps: 31", "workload.steps has changed since"),
        ("mine", "name: mine|name: yours", "is a run of 'mine', and"),
        ("mine", "rank: 1|rank: 0", "faults has changed since"),
        ("mine", "version: 1|version: 7", "version"),
        ("nothing", "", "is not a run directory"),
    ],
)
def test_a_run_that_cannot_say_is_refused(
    played: Path, run: str, spoil: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old, _, new = spoil.partition("|")
    source = played / "mine.yaml"
    source.write_text(LOOSE.replace(old, new) if old else LOOSE)
    before = source.read_text()
    assert invoke(["init", "--from", str(played / "runs" / run / "latest")]) == EXIT_USAGE
    assert words in capsys.readouterr().err
    assert source.read_text() == before


@pytest.mark.real
def test_a_run_of_a_scenario_that_is_gone_is_refused(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = played / "mine.yaml"
    source.unlink()
    assert invoke(["init", "--from", str(played / "runs/mine/latest")]) == EXIT_USAGE
    assert "is not here" in capsys.readouterr().err
    source.write_text(LOOSE)


@pytest.mark.slow
def test_a_simulated_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "sim.yaml"
    scenario.write_text(
        "version: 1\nname: sim\nlauncher: sim\nrecovery: hot-spare\n"
        "workload: {kind: mlp, ranks: 2, steps: 20}\n"
        "faults: [{id: k, kind: process-kill, target: {rank: 1}, at: {step: 9}}]\n"
        'sla: {recovery_time: ["max < 60s"]}\n'
    )
    assert unreported(["run", str(scenario), "--runs", str(tmp_path / "runs"), "-q"]) == EXIT_PASS
    assert invoke(["init", "--from", str(tmp_path / "runs/sim/latest")]) == EXIT_USAGE
    assert "it was simulated" in capsys.readouterr().err
