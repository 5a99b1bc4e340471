"""A stored run whose scenario cannot be read is bad input to each command that is given one; one
that has just been played is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.test_schemas import SCENARIO
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.scenario.model import ResolvedRun
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.run import runner

SPOIL: dict[str, Callable[[str], str]] = {
    "cut in a line": lambda text: text[: len(text) // 2],
    "cut in a word": lambda text: text[: text.index("scenario:") + 5],
    "empty": lambda text: "",
    "a list": lambda text: "- 1\n- 2\n",
    "a number": lambda text: "7\n",
    "no YAML": lambda text: "{\0[",
    "cells of another type": lambda text: text.replace("cells:", "cells: 3\nothers:"),
    "a size that no model has": lambda text: text.replace("params: {}", "params: {size: 7b}"),
    "a parameter that its fault has not": lambda text: re.sub(
        r"(kind: process-kill\n +params: ){}", r"\1{zork: 1}", text
    ),
    "a word for a seed": lambda text: text.replace("seed: ", "seed: many #"),
}
COMMANDS = (
    "project --runs RUN --gpus 64 --trials 5 --days 1 -q",
    "project --compare RUN -q",
    "analyze RUN",
    "report RUN",
    "explain RUN",
    "compare RUN RUN",
    "gate RUN",
    "baseline save RUN -o baseline.json",
    "export otel RUN",
    "gate RUN --baseline RUN",
)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("played")
    (place / "small.yaml").write_text(SCENARIO)
    assert invoke(["run", str(place / "small.yaml"), "--runs", str(place), "-q"]) == 0
    (place / "small/latest/seal.json").unlink()
    return (place / "small" / "latest").resolve()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_file_is_named_and_it_is_a_mistake_of_usage(
    played: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = RunDirectory(played).resolved
    whole = path.read_text()
    words = [str(played) if word == "RUN" else word for word in command.split()]
    try:
        for how, spoil in SPOIL.items():
            path.write_text(spoil(whole))
            code = invoke(words)
            said = capsys.readouterr()
            assert code == 2, (how, said.err)
            assert f"{path} is damaged: " in said.err and "or name another run" in said.err, how
            assert "Traceback" not in said.err and "defect" not in said.err, how
            assert len(said.err) < 1000, how
    finally:
        path.write_text(whole)


def test_what_a_run_has_just_written_is_nobodys_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that loses it is a failure of the machine."""

    def lost(run: RunDirectory, resolved: ResolvedRun) -> None:
        run.resolved.write_text("")

    monkeypatch.setattr(runner, "write_resolved", lost)
    (tmp_path / "small.yaml").write_text(SCENARIO)
    assert invoke(["run", str(tmp_path / "small.yaml"), "--runs", str(tmp_path), "-q"]) == 4
    assert "scenario.resolved.yaml is damaged" in capsys.readouterr().err
