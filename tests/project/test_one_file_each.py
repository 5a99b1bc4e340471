"""Adding a fault, strategy, workload, launcher, report or stack is adding one file: one of each is
added to a copy of the packages, and runs there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.decided import but_for_noise

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("chaos", "harness", "recovery", "reports")
LIMIT_S = 120.0

ADDED = {
    "chaos/faults/late_kill.py": '''
"""A rank is killed."""

from trainchaos.chaos.faults.process_kill import ProcessKill


class LateKill(ProcessKill):
    """Kill it."""
''',
    "recovery/policy/strategies/steady.py": '''
"""A spare takes the lost rank's place."""

from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import ClusterView, Decision


class Steady(HotSpare):
    """Swap it in."""

    def on_failure(self, view: ClusterView) -> Decision:
        """As it does, in other words."""
        return Decision(actions=super().on_failure(view).actions, reason="steadily")
''',
    "harness/workloads/line.py": '''
"""A regression with a step size of its own."""

from pydantic import Field

from trainchaos.harness.workloads.mlp import Mlp


class Line(Mlp):
    """Fit it."""

    lr: float = Field(default=0.01, gt=0)
''',
    "harness/launchers/calm.py": '''
"""Processes of this machine."""

from trainchaos.harness.launchers.local import Local


class Calm(Local):
    """Start them."""
''',
    "reports/brief.py": '''
"""``brief.txt``: the verdict in a word."""

from pathlib import Path

from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results


def render(run: RunDirectory, results: Results) -> Path:
    """Write it."""
    path = run.root / "brief.txt"
    path.write_text(results.verdict)
    return path
''',
    "harness/compare/stacks/swift.py": '''
"""A stack that this project drives."""

from typing import ClassVar

from trainchaos.harness.compare.stacks._recovery import RecoveryStack


class Swift(RecoveryStack):
    """The added strategy, from outside."""

    title: ClassVar[str] = "swift"
    strategy: ClassVar[str] = "steady"
''',
}
SCENARIO = """version: 1
name: added
launcher: {kind: calm}
workload: {kind: line, ranks: 2, steps: 400, global_batch: 8, checkpoint: {every: 20},
  determinism: default}
recovery: steady
invariants: {leave_out: [liveness]}  # a busy machine may make it inconclusive
faults: [{id: hit, kind: late-kill, target: {rank: 1}, at: {step: 20}}]
"""
FAMILY = """version: 1
name: kill
description: one rank is killed
workload: {kind: gpt, size: nano, params: {data: DATA}, ranks: 2, steps: 40, global_batch: 8,
  checkpoint: {every: 10}}
recovery: hot-spare
faults: [{id: hit, kind: process-kill, target: {rank: 1}, at: {step: 14}}]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the packages, and one more plugin of each sort."""
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(ROOT / "trainchaos", tmp_path / "trainchaos", symlinks=True)
    shutil.copy(ROOT / "constraints.txt", tmp_path)
    for name, text in ADDED.items():
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text.lstrip())
    return tmp_path


def chaos(place: Path, *words: str) -> str:
    """What the copy's ``chaos`` prints; it has to end with 0."""
    done = _chaos(place, *words)
    assert but_for_noise(done.returncode, place / "runs") == 0, done.stdout
    return done.stdout


def _chaos(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainchaos", *words],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(place)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.long
def test_what_is_added_runs(place: Path) -> None:
    (place / "added.yaml").write_text(SCENARIO)
    chaos(place, "run", "added.yaml", "--runs", "runs")
    run = (place / "runs/added/latest").resolve()
    assert (run / "brief.txt").read_text() == "pass"
    results = json.loads((run / "results.json").read_text())
    assert (results["workload"]["kind"], results["cells"][0]["strategy"]) == ("line", "steady")
    (incident,) = results["faults"]
    seen = [incident[key] for key in ("kind", "landed", "decision", "outcome")]
    assert seen == ["late-kill", True, "steadily", "recovered"]


@pytest.mark.long
def test_a_stack_that_is_added_is_compared(place: Path) -> None:
    assert "swift" in chaos(place, "stacks", "list")
    (place / "text").write_bytes(bytes(range(256)) * 8)
    (place / "kill.yaml").write_text(FAMILY.replace("DATA", str(place / "text")))
    words = ("--stacks", "swift:default", "--runs", "runs", "--name", "x", "--deadline", "30")
    chaos(place, "compare", "kill.yaml", *words)
    made = json.loads((place / "runs/compare/x/compare.json").read_text())
    assert [t["outcome"] for t in made["trials"] if t["family"] == "kill"] == ["recovered"]
