"""Environments of stacks: made whole or not at all, by a Python and a pip that are fakes (no
network).
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from trainchaos.chaos import cli
from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.harness.compare.environments import environments, installing
from trainchaos.harness.compare.environments.environments import MARK, OWNED
from trainchaos.harness.compare.environments.stack import CommonJob, Drive, Requirements, Stack

FAKE_PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *" install "*)
    echo "$*" >> "$FAKE/asked"
    echo "Collecting everything"
    if [ -e "$FAKE/words" ]; then cat "$FAKE/words"; exit 1; fi
    if [ -e "$FAKE/hold" ]; then echo $$ > "$FAKE/pid"; read -r never < "$FAKE/hold"; fi ;;
  *" list "*) echo '[{"name": "torch", "version": "2.13.0+cpu"},'
    echo ' {"name": "Some_Thing", "version": "1.2"}]' ;;
  -c*) if [ -e "$FAKE/unimportable" ]; then echo "ImportError: no libfoo.so"; exit 1; fi ;;
esac
"""
CLASH = """Collecting a
ERROR: Cannot install a==1 and b==2 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested c==3
    a 1 depends on c<2

To fix this you could try to:
1. loosen the range of package versions you've specified
ERROR: ResolutionImpossible: for help visit the documentation
"""


class Fake(Stack):
    """A stack with an environment of its own."""

    requirements: ClassVar[Requirements | None] = Requirements(
        pins=("some-thing==1.2", "numpy==2.0.0"),
        without_dependencies=("loner==3",),
        probe="some_thing",
    )

    def chosen(self) -> dict[str, object]:
        """Nothing."""
        return {}

    def drive(self, job: CommonJob, python: Path) -> Drive:
        """Nothing."""
        return Drive(argv=(str(python),))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python with which environments are made, and a place for them."""
    (tmp_path / "fake").mkdir()
    python = tmp_path / "fake" / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("FAKE", str(tmp_path / "fake"))
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path / "stacks"))
    monkeypatch.setattr(environments, "stacks", lambda: {"fake": Fake})
    monkeypatch.setattr(installing, "LOOK_S", 0.01)
    return python


def quiet(line: str) -> None:
    """Nobody listens."""


def asked(base: Path) -> list[str]:
    path = base.with_name("asked")
    return path.read_text().splitlines() if path.exists() else []


def test_an_install_makes_it_ready_and_a_second_leaves_it_alone(base: Path) -> None:
    before = environments.look("fake")
    assert not before.ready and before.why == "it is not installed"
    lines: list[str] = []
    found = installing.install("fake", lines.append, base=base)
    assert found.ready and found.python.exists()
    assert found.versions["Some_Thing"] == "1.2" and found.versions["torch"] == "2.13.0+cpu"
    first, alone = asked(base)
    assert "torch==2.13.0" in first and "some-thing==1.2" in first and "loner" not in first
    assert "numpy==2.0.0" in first and first.count("numpy==") == 1, (
        "the stack's own pin goes before ours"
    )
    assert alone.endswith("--no-deps loner==3")
    assert any("pinned packages" in line for line in lines)
    assert not found.directory.with_name("fake.log").exists()  # type: ignore[union-attr]
    assert installing.install("fake", quiet, base=base) == found
    assert len(asked(base)) == 2


def nothing_left(base: Path) -> bool:
    """No environment is ready, and a failed install has removed its own."""
    found = environments.look("fake")
    return not found.ready and found.directory is not None and not found.directory.exists()


def test_versions_that_clash_are_said_in_the_words_of_pip_and_nothing_is_left(base: Path) -> None:
    base.with_name("words").write_text(CLASH)
    with pytest.raises(ScenarioError) as caught:
        installing.install("fake", quiet, base=base)
    said, hint = str(caught.value), caught.value.hint
    assert "a 1 depends on c<2" in said and "ResolutionImpossible" not in said
    assert "harness/compare/stacks" in hint and "fake.log" in hint
    assert nothing_left(base)
    base.with_name("words").unlink()
    assert installing.install("fake", quiet, base=base).ready


@pytest.mark.parametrize("how", ["unimportable", "interrupted", "too long"])
def test_an_install_that_does_not_end_well_leaves_no_process_and_no_directory(
    base: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    pid = base.with_name("pid")
    words = {"unimportable": r"no libfoo\.so", "too long": "took more than"}.get(how)
    if how == "unimportable":
        base.with_name("unimportable").touch()
    else:
        os.mkfifo(base.with_name("hold"))
    if how == "too long":
        monkeypatch.setattr(installing, "LIMIT_S", 0.3)

    def say(line: str) -> None:
        if how == "interrupted" and pid.exists() and pid.read_text().strip():
            raise KeyboardInterrupt

    error = KeyboardInterrupt if how == "interrupted" else InfrastructureError
    with pytest.raises(error, match=words):
        installing.install("fake", say, base=base)
    assert nothing_left(base)
    if how == "interrupted":
        assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_what_a_killed_install_has_left_is_made_anew(base: Path) -> None:
    directory = environments.root() / "fake"
    (directory / "lib").mkdir(parents=True)
    (directory / OWNED).touch()
    assert environments.look("fake").why == "an install of it was interrupted"
    assert installing.install("fake", quiet, base=base).ready
    assert not (directory / "lib").exists()


def test_a_directory_of_somebody_else_is_never_removed(base: Path) -> None:
    directory = environments.root() / "fake"
    directory.mkdir(parents=True)
    (directory / "thesis.txt").touch()
    for act in (
        lambda: installing.install("fake", quiet, base=base),
        lambda: installing.remove("fake"),
    ):
        with pytest.raises(InfrastructureError, match="was not made by chaos stacks install"):
            act()
    assert (directory / "thesis.txt").exists()


def test_other_pins_or_a_damaged_mark_make_it_stale(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = installing.install("fake", quiet, base=base)
    assert found.directory is not None
    (found.directory / MARK).write_text('{"wanted": 7}')
    assert not environments.look("fake").ready
    installing.install("fake", quiet, base=base)
    monkeypatch.setattr(Fake, "requirements", Requirements(pins=("some-thing==1.3",)))
    assert environments.look("fake").why == "it was made for other versions"
    assert installing.install("fake", quiet, base=base).ready
    assert "some-thing==1.3" in asked(base)[-1]
    assert installing.remove("fake") == found.directory and installing.remove("fake") is None
    assert not environments.look("fake").ready


def test_two_installs_at_once_wait_for_each_other(base: Path) -> None:
    environments.root().mkdir(parents=True)
    other = os.open(environments.root() / ".fake.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    waited: list[str] = []

    def say(line: str) -> None:
        if "another install" in line and not waited:
            waited.append(line)
            (environments.root() / "fake").mkdir()
            (environments.root() / "fake" / OWNED).touch()
            with pytest.raises(InfrastructureError, match="is being installed"):
                installing.remove("fake")
            os.close(other)

    assert installing.install("fake", say, base=base).ready and waited


def test_an_unfit_python_is_said_before_anything_is_made(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "requirements", Requirements(pins=(), python=">=3.30,<3.40"))
    assert "it works with Python" in environments.look("fake").why
    with pytest.raises(ScenarioError, match=r"it works with Python >=3\.30"):
        installing.install("fake", quiet, base=base)
    assert not environments.root().exists()


@pytest.mark.parametrize(("version", "fits"), [("3.9", False), ("3.11", True), ("3.13", False)])
def test_versions_of_python_are_compared_as_numbers(version: str, fits: bool) -> None:
    wanted = Requirements(pins=(), python=">=3.11,<3.13")
    assert (environments.unfit(wanted, version) is None) == fits


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            (
                "ERROR: Could not find a version that satisfies the requirement x==9 (from"
                " versions: 1.0, 2.0)\nERROR: No matching distribution found for x==9\n"
            ),
            [
                "Could not find a version that satisfies the requirement x==9",
                "No matching distribution found for x==9",
            ],
        ),
        ("\x1b[31mERROR: it\x1b[0m is\n", ["it is"]),
        ("Traceback\n  line\nImportError: no\n", ["Traceback", "  line", "ImportError: no"]),
        ("", ["it said nothing"]),
        ("ERROR: a\n" * 99, ["a"]),
    ],
)
def test_the_words_of_pip(text: str, lines: list[str]) -> None:
    assert installing.pip_words(text) == lines


def test_a_wrong_name_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("install", "show", "remove"):
        assert cli.invoke(["stacks", verb, "torchrum"]) == 2
        assert "did you mean 'torchrun'?" in capsys.readouterr().err
    assert cli.invoke(["stacks", "install"]) == 2
    assert cli.invoke(["stacks", "install", "--all", "torchrun"]) == 2
    assert cli.invoke(["stacks", "remove"]) == 2


def test_the_verbs_of_stacks(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    really = installing.install
    monkeypatch.setattr(installing, "install", lambda name, say: really(name, say, base=base))

    def said(argv: list[str], code: int = 0) -> str:
        assert cli.invoke(argv) == code
        return capsys.readouterr().out

    assert "chaos stacks install fake" in said(["stacks", "list"])
    assert "missing" in said(["stacks", "show", "fake"])
    assert "fake: ready in" in said(["stacks", "install", "--all"])
    assert "fake: was ready" in said(["stacks", "install", "fake"])
    (row,) = json.loads(said(["stacks", "list", "--format", "json"]))
    assert row["ready"] and row["versions"]["torch"] == "2.13.0+cpu"
    shown: Any = json.loads(said(["stacks", "show", "fake", "--format", "json"]))
    assert set(shown["settings"]) == {"default", "tuned"} and "loner==3" in shown["pins"]
    assert "removed" in said(["stacks", "remove", "fake"])
    assert "no environment" in said(["stacks", "remove", "fake"])
    base.with_name("words").write_text(CLASH)
    said(["stacks", "install", "fake"], code=2)


@pytest.mark.usefixtures("names_at_once")
def test_doctor_says_what_there_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.invoke(["doctor", "--format", "json", "--runs", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    names = {"python", "torch", "cores", "memory", "disk", "gpus", "docker", "slurm", "root"}
    names |= {"cgroup", "links", "names"}
    assert names | {f"stack {name}" for name in environments.stacks()} <= set(rows)
    assert all(row["todo"] for row in rows.values() if row["state"] != "ready")
    assert cli.invoke(["doctor", "--runs", str(tmp_path)]) == 0
    assert "stack torchrun" in capsys.readouterr().out
