"""``chaos compare`` from the command line: programs that are really killed, interrupted, resumed
and reported.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import read_log
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.environments.stack import CommonJob, Drive, Stack
from trainchaos.harness.compare.plan.directory import Directory
from trainchaos.harness.compare.result.gather import gather
from trainchaos.harness.compare.result.model import Comparison

TRAINER = Path(__file__).parents[2] / "support" / "fakes" / "fake_trainer.py"
FAMILY = """version: 1
name: kill
description: one rank is killed
workload: {kind: gpt, size: nano, params: {data: DATA}, ranks: 2, steps: 22, global_batch: 8,
  checkpoint: {every: 10}}
recovery: hot-spare
faults: [{id: hit, kind: process-kill, target: {rank: 1}, at: {step: 14}}]
"""
LIMIT_S = 90.0


class _Fake(Stack):
    """The fake trainer with options of its own."""

    options: ClassVar[tuple[str, ...]] = ()

    def chosen(self) -> Mapping[str, object]:
        return {word: True for word in self.options}

    def drive(self, job: CommonJob, python: Path) -> Drive:
        argv = [
            str(python),
            str(TRAINER),
            "launch",
            "--beacon",
            "--ranks",
            str(job.ranks),
            "--steps",
            str(job.steps),
        ]
        return Drive(
            argv=(
                *argv,
                "--save-every",
                str(job.every),
                "--step-s",
                "0.06",
                "--late-s",
                "0.2",
                *self.options,
            ),
            env=job.environment(),
        )


class Restarts(_Fake):
    """Begins again from the checkpoint."""

    ours: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ("--restarts", "3")


class Dies(_Fake):
    """Does not begin again."""


STACKS: dict[str, type[Stack]] = {"restarts": Restarts, "dies": Dies}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a fault family; the fake stacks are all there are."""
    monkeypatch.setattr(environments, "stacks", lambda: STACKS)
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "kill.yaml").write_text(FAMILY.replace("DATA", str(tmp_path / "text")))
    return tmp_path


def compare(place: Path, *words: str) -> int:
    """The exit code of a comparison called x."""
    return invoke(["compare", *words, "--runs", str(place / "runs"), "--deadline", "120"])


def written(place: Path) -> Comparison:
    """What its report holds."""
    return Comparison.model_validate_json((place / "runs/compare/x/compare.json").read_text())


def done_by_all(run: Path) -> int:
    """The last step that both ranks of the first generation of an arm had reported."""
    (arm,) = (run / "events").iterdir()
    first = [one for one in read_log(arm).of(Kind.STEP_REPORTED) if one.generation == 1]
    last = [max(e.step or 0 for e in first if e.data["rank"] == rank) for rank in range(2)]
    return min(last)


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
def test_a_comparison_is_played_resumed_extended_and_gathered_again(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = str(place / "kill.yaml")
    assert compare(place, family, "--name", "x", "--price", "2.5") == 0
    said = capsys.readouterr().out
    assert "4: 2 with a fault, 2 controls" in said
    assert "[4/4]" in said and "compare.html" in said
    made = written(place)
    trials = {trial.label: trial for trial in made.trials}
    assert trials["restarts default"].outcome == "rolled back"
    done = done_by_all(place / "runs/compare/x" / trials["restarts default"].run)
    assert 12 <= done < 20, "one rank had reported step 13, so both had step 12"
    assert trials["restarts default"].steps_lost == done - 10, "restored from 10"
    assert trials["restarts default"].samples_lost == 0
    assert 0 < (trials["restarts default"].recovery or 0) < math.inf
    assert (trials["dies default"].outcome, trials["dies default"].recovery) == (
        "all ranks died",
        math.inf,
    )
    assert made.reference == "restarts default"
    (ratio,) = [ratio for ratio in made.ratios if ratio.metric == "recovery"]
    assert (ratio.label, ratio.value, ratio.says) == ("dies default", math.inf, "too few")
    assert made.price == 2.5 and made.missing == 0 and made.finished

    directory = Directory(place / "runs/compare/x")
    lines = directory.trials.read_text().splitlines(keepends=True)
    lost = json.loads(lines[1])["arm"]
    directory.trials.write_text("".join([lines[0], *lines[2:]]))
    assert compare(place, family, "--name", "x") == 2, "it holds a comparison already"
    assert "--resume goes on with it" in capsys.readouterr().err
    assert compare(place, "--resume", "--name", "x") == 0
    assert "1 arms (measured)" in capsys.readouterr().out
    again = directory.trials.read_text().splitlines()
    assert len(again) == 4 and json.loads(again[-1])["arm"] == lost
    assert gather(directory).missing == 0

    path = next(
        path
        for path in (place / "runs/compare/x/scenarios").iterdir()
        if "dies.kill" in path.name.replace("-default", "")
    )
    assert invoke(["validate", str(path), "-q"]) == 0, "any arm can be played alone"
    assert invoke(["compare", str(place / "runs/compare/x"), "-q"]) == 0
    assert len(written(place).trials) == 2
    runs = [str(directory.root / trial.run) for trial in made.trials]
    assert invoke(["compare", *runs, "--runs", str(place / "runs"), "--name", "stored", "-q"]) == 0
    assert (place / "runs/compare/stored/compare.json").is_file()


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
def test_an_interrupted_comparison_leaves_nothing_and_says_how_to_go_on(place: Path) -> None:
    program = (
        "import signal, sys\n"
        # a shell may have had it ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[3])!r})\n"
        "from tests.harness.compare import test_compare_real as tests\n"
        "from trainchaos.harness.compare.environments import environments\n"
        "environments.stacks = lambda: tests.STACKS\n"
        f"words = [{str(place / 'kill.yaml')!r}, '--name', 'x', '--stacks', 'restarts']\n"
        f"sys.exit(tests.compare(tests.Path({str(place)!r}), *words))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("[1/2]"):
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, errors
    assert f"chaos compare --resume --name x --runs {place / 'runs'}" in errors
    assert not [pid for pid in _living(place)]
    directory = Directory(place / "runs/compare/x")
    assert len(directory.played()) == 1
    assert written(place).missing == 1


def _living(place: Path) -> list[str]:
    """Processes that a run below ``place`` has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if f"CHAOS_SCRATCH={place}".encode() in (
                entry / "environ"
            ).read_bytes() and entry.name != str(os.getpid()):
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("names_at_once")
def test_a_dry_run_says_what_would_be_done_and_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(place / "kill.yaml"), "--name", "x", "--repeat", "3", "--same", "--dry-run"]
    assert compare(place, *words) == 0
    said = capsys.readouterr().out
    assert "18: 9 with a fault, 9 controls" in said
    assert "restarts default again" in said and "a guess" in said
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kill.yaml", "--stacks", "restart"], "did you mean 'restarts'?"),
        (["kill.yaml", "--stacks", "restarts:tune"], "did you mean 'tuned'?"),
        ([], "name fault families"),
        (["absent.yaml"], "absent.yaml"),
        (["kill.yaml", "."], "not both"),
        (["."], "is not a run directory"),
        (["--resume"], "no comparison"),
        (["--resume", "--name", "y"], "is not a comparison"),
        (["kill.yaml", "--resume", "--anew"], "not both"),
        (["kill.yaml", "--name", "../y"], "write y"),
    ],
)
def test_what_is_wrong_ends_with_2_and_says_what_to_do(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    given = [
        str(place / word) if word in ("kill.yaml", "absent.yaml", ".") else word for word in words
    ]
    assert compare(place, *given) == 2
    assert message in capsys.readouterr().err
    assert not list(place.glob("runs/compare/*/runs"))
