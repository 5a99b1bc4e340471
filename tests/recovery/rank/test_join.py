"""``recovery.join()``: what a script and its supervisor have to agree on, a script nobody
supervises, the example.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from trainchaos import recovery
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.rank.joining import (
    JoinError,
    ScriptSettings,
    SupervisedPlace,
    SupervisorSettings,
    settle,
    taking,
)
from trainchaos.recovery.rank.script import ScriptError, describe, run_script

ROOT = Path(__file__).resolve().parents[3]
PLAIN, RECOVERABLE = ROOT / "examples" / "ddp_plain.py", ROOT / "examples" / "ddp_recoverable.py"
MOST_CHANGED_LINES = 10
LIMIT_S = 120.0

LOOP = """
import sys, torch
from trainchaos import recovery
job = recovery.join(samples=64, steps=6, global_batch=4, OPTIONS)
torch.manual_seed(job.seed)
model = torch.nn.Linear(3, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
while job.running():
    with job.step() as step:
        x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in step.samples])
        step.backward(model(x).square().sum())
        step.commit()
        print("step", step.number, job.rank, job.world, flush=True)
print("end", float(model.weight.detach().sum()))
"""


class Described(Exception):
    """A script has joined."""


def loop(path: Path, **more: object) -> Path:
    """A small script that trains six steps."""
    options = ", ".join(f"{name}={value!r}" for name, value in more.items())
    path.write_text(LOOP.replace("OPTIONS", options))
    return path


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python there."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


# ---- who says what


def settled(seat: SupervisorSettings, **script: Any) -> JobConfig:
    """What a script's job would be under a supervisor."""
    given = {"samples": 64, "steps": 10, "global_batch": 8, **script}
    kept = {
        f"checkpoint_{name}": given.pop(f"checkpoint_{name}", None)
        for name in ("dir", "every", "keep")
    }
    return settle(seat, ScriptSettings.model_validate(given), **kept)


def seat(**more: object) -> SupervisorSettings:
    """A place in a job of two ranks."""
    return SupervisorSettings.model_validate(
        {"supervisor": "the scenario", "process": "w0", "world": 2, **more}
    )


@pytest.mark.parametrize(
    ("said", "script", "complaint"),
    [
        ({"steps": 60}, {"steps": 10}, "joins with steps=10, the scenario says 60"),
        ({"samples": 60}, {}, "joins with samples=64, the scenario says 60"),
        ({"global_batch": 4}, {}, "joins with global_batch=8, the scenario says 4"),
        ({"seed": 3}, {"seed": 1}, "joins with seed=1, the scenario says 3"),
        ({}, {"steps": None}, "nobody says what steps is"),
        ({}, {"global_batch": None}, "nobody says what global_batch is"),
        ({}, {"global_batch": 1}, "global_batch 1 cannot feed 2 ranks"),
        ({}, {"samples": 0}, "samples is 0"),
        ({}, {"steps": -1}, "steps is -1"),
        ({}, {"seed": -1}, "seed is -1"),
        ({}, {"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"restores": True}, {}, "nobody says where"),
    ],
)
def test_a_script_and_its_supervisor_that_disagree_are_told_so(
    said: dict[str, object], script: dict[str, object], complaint: str
) -> None:
    with pytest.raises(JoinError, match=complaint) as error:
        settled(seat(**said), **script)
    assert error.value.hint


def test_either_may_say_it_and_the_supervisor_says_where_checkpoints_go() -> None:
    config = settled(
        seat(steps=10, seed=3, checkpoint_dir="/there", checkpoint_every=7), checkpoint_dir="here"
    )
    assert (config.steps, config.global_batch, config.seed) == (10, 8, 3)
    assert (config.checkpoint_dir, config.checkpoint_every, config.checkpoint_keep) == (
        Path("/there"),
        7,
        3,
    )
    config = settled(
        seat(), steps=5, seed=2, checkpoint_dir="here", checkpoint_every=9, checkpoint_keep=1
    )
    assert (config.steps, config.seed, config.world, config.process) == (5, 2, 2, "w0")
    assert (config.checkpoint_dir, config.checkpoint_every, config.checkpoint_keep) == (
        Path("here"),
        9,
        1,
    )
    config = settled(seat())
    assert (config.seed, config.checkpoint_dir, config.checkpoint_every) == (0, None, 100)


# ---- scripts that do not keep to it


@pytest.mark.parametrize(
    ("source", "error", "complaint"),
    [
        ("x = 1", JoinError, "ended without recovery.join"),
        ("import sys; sys.exit('no data')", ScriptError, "no data"),
        ("import sys; sys.exit(3)", ScriptError, "3"),
        (
            "import sys; assert sys.argv[1:] == ['a', 'b'], sys.argv\nraise KeyError('mine')",
            KeyError,
            "mine",
        ),
    ],
)
def test_a_script_that_never_joins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    error: type[Exception],
    complaint: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "script.py").write_text(source)
    with pytest.raises(error, match=complaint):
        run_script(tmp_path / "script.py", ["a", "b"], SupervisedPlace(settings=seat()))


def test_a_place_that_only_asks_hears_what_the_script_says() -> None:
    heard: list[ScriptSettings] = []

    def hear(facts: ScriptSettings) -> NoReturn:
        heard.append(facts)
        raise Described

    with taking(SupervisedPlace(settings=seat(), describe=hear)), pytest.raises(Described):
        recovery.join(samples=5, steps=6)
    assert heard == [ScriptSettings(samples=5, steps=6)]


@pytest.mark.real
def test_describing_runs_a_script_no_further_than_join(tmp_path: Path) -> None:
    facts = describe(loop(tmp_path / "train.py"), [])
    assert (facts.samples, facts.steps, facts.global_batch, facts.seed) == (64, 6, 4, None)


@pytest.mark.long
@pytest.mark.real
def test_a_script_that_does_not_come_to_join_is_described_by_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\nraise ValueError('no such file: corpus')\n")
    with pytest.raises(JoinError, match="ValueError: no such file: corpus"):
        describe(tmp_path / "train.py", [])


# ---- nobody supervises


@pytest.mark.long
@pytest.mark.real
def test_a_script_nobody_supervises_trains_as_one_rank_and_resumes(tmp_path: Path) -> None:
    script = loop(tmp_path / "train.py", checkpoint_dir="kept", checkpoint_every=4)
    first, again = python(script, cwd=tmp_path), python(script, cwd=tmp_path)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert [line for line in first.stdout.splitlines() if line.startswith("step")] == [
        f"step {number} 0 1" for number in range(1, 7)
    ]
    assert "step 4 " not in again.stdout and "step 5 0 1" in again.stdout, (
        "it went on after the checkpoint"
    )
    assert first.stdout.splitlines()[-1] == again.stdout.splitlines()[-1], "the same result"
    assert not first.stderr and not again.stderr


@pytest.mark.long
@pytest.mark.real
def test_joining_twice_is_an_error(tmp_path: Path) -> None:
    script = loop(tmp_path / "train.py")
    script.write_text(script.read_text() + "recovery.join(samples=64, steps=6, global_batch=4)\n")
    ran = python(
        "-m", "trainchaos.recovery.run", "--ranks", "1", "--spares", "1", script, cwd=tmp_path
    )
    assert ran.returncode == 1
    assert "after the last step w0: JoinError: recovery.join() was called twice" in ran.stderr


@pytest.mark.real
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            ".sum())",
            ".sum() * float('nan'))",
            "step 1: the loss or a gradient is not finite; nobody supervises",
        ),
        ("step.commit()", "continue", "step 1 ended without step.commit()"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (
                    "step.commit()",
                    "step.backward(model(x).sum())",
                    "step.backward() was called twice in one step",
                ),
                ("step.commit()", "step.commit(); step.commit()", "step 1 was committed already"),
                ("step.backward(", "(", "commit() before backward()"),
                ("job.attach(", "(", "job.attach(model, optimizer) comes before job.running()"),
            )
        ),
    ],
)
@pytest.mark.sample(1)
def test_a_step_that_fails_without_a_supervisor_is_an_error(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    script = loop(tmp_path / "train.py")
    script.write_text(script.read_text().replace(old, new))
    ran = python(script, cwd=tmp_path)
    assert ran.returncode == 1
    assert complaint in ran.stderr


@pytest.mark.real
def test_joining_loads_no_torch_before_it_is_asked_to() -> None:
    code = (
        "import sys; from trainchaos import recovery; import trainchaos.recovery.run;"
        " assert 'torch' not in sys.modules; recovery.Job;"
        " recovery.Step"
    )
    assert python("-c", code, cwd=ROOT).returncode == 0
    with pytest.raises(AttributeError, match="nothing"):
        _ = recovery.nothing


# ---- the example


def test_the_example_needs_few_changed_lines() -> None:
    diff = list(difflib.ndiff(PLAIN.read_text().splitlines(), RECOVERABLE.read_text().splitlines()))
    added = [line for line in diff if line.startswith("+ ")]
    removed = [line for line in diff if line.startswith("- ")]
    print(f"{len(added)} lines new, {len(removed)} gone")
    assert len(added) <= MOST_CHANGED_LINES, "\n".join(added)
    assert 55 <= len(PLAIN.read_text().splitlines()) <= 70


@pytest.mark.real
@pytest.mark.long
def test_the_plain_script_trains_as_it_is(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            str(PLAIN),
            "1",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("loss ")
    assert (tmp_path / "ddp-model.pt").is_file()
