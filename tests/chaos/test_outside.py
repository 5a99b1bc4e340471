"""Plugins from outside: directories, ``chaos.yaml`` and entry points. A broken one is named and
left out, and only what needs it fails.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands.forked import Commands
from tests.support.decided import but_for_noise

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
pytestmark = pytest.mark.slow
FAULT = '''
"""A rank is killed, late."""

from typing import ClassVar

from trainchaos.chaos.faults.process_kill import ProcessKill


class LateKill(ProcessKill):
    """Kill a rank."""
'''
STRATEGY = '''
"""As hot-spare."""

from trainchaos.recovery.policy.strategies.hot_spare import HotSpare


class Calm(HotSpare):
    """A spare takes the lost rank's place, calmly."""
'''
REPORT = '''
"""``brief.txt``: the verdict in a word."""


def render(run, results):
    """Write it."""
    path = run.root / "brief.txt"
    path.write_text(results.verdict)
    return path
'''
SCENARIO = """\
version: 1
name: outside
workload: {kind: mlp, ranks: 2, steps: 30, global_batch: 8, checkpoint: {every: 10}}
recovery: calm
invariants: {leave_out: [liveness]}  # steps of a millisecond are too short to tell
faults: [{id: hit, kind: late-kill, target: {rank: 1}, at: {step: 12}}]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A project with plugins in the directory ``mine``."""
    for name, text in {
        "faults/late_kill.py": FAULT,
        "strategies/calm.py": STRATEGY,
        "reports/brief.py": REPORT,
    }.items():
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (tmp_path / "outside.yaml").write_text(SCENARIO)
    return tmp_path


Chaos = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


@pytest.fixture
def chaos(commands: Commands) -> Chaos:
    """Runs the command line in a directory. ``path``: of more distributions."""

    def run(at: Path, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        return commands.run(words, at=at, env=environment(), path=[str(path)] if path else [])

    return run


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "CHAOS_PLUGINS"}


def real_chaos(at: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "trainchaos", *words],
        cwd=at,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def listed(done: subprocess.CompletedProcess[str]) -> dict[str, set[str]]:
    return {kind: {one["name"] for one in rows} for kind, rows in json.loads(done.stdout).items()}


@pytest.mark.long
@pytest.mark.real
def test_plugins_of_a_directory_take_part_in_a_run(place: Path) -> None:
    """Ranks too find the fault: they are other processes."""
    words = ("run", "outside.yaml", "--plugins", "mine")
    done = real_chaos(place, *words)
    assert but_for_noise(done.returncode, place / "runs") == 0, done.stdout + done.stderr
    assert (place / "runs" / "outside" / "latest" / "brief.txt").read_text() == "pass"
    chosen = real_chaos(place, "validate", "outside.yaml")
    assert chosen.returncode == 2 and "unknown fault kind 'late-kill'" in chosen.stderr


@pytest.mark.long
def test_a_run_is_judged_again_with_its_plugins(place: Path, chaos: Chaos) -> None:
    done = chaos(place, "run", "outside.yaml", "--plugins", "mine", "--launcher", "sim")
    assert done.returncode == 0, done.stdout + done.stderr
    (judge,) = (one for one in done.stdout.splitlines() if one.startswith("judge   "))
    words = shlex.split(judge)
    assert words[1:3] == ["chaos", "analyze"] and words[-2:] == ["--plugins", "mine"]
    again = chaos(place, *words[2:])
    assert again.returncode == 0, again.stdout + again.stderr
    without = chaos(place, "analyze", words[3])
    assert without.returncode == 3
    assert "no fault kind here is called 'late-kill': give --plugins mine" in without.stdout
    assert "KeyError" not in without.stdout
    resolved = place / words[3] / "scenario.resolved.yaml"
    resolved.write_text(resolved.read_text().replace("kind: sim", "kind: hers"))
    nowhere = chaos(place, "analyze", words[3])
    assert nowhere.returncode == 2
    assert "no launcher here is called 'hers': give --plugins mine" in nowhere.stderr


def test_a_projects_settings_name_directories(place: Path, chaos: Chaos) -> None:
    (place / "chaos.yaml").write_text("plugins: [mine]\n")
    assert chaos(place, "validate", "outside.yaml").returncode == 0
    (place / "chaos.yaml").write_text(SCENARIO)
    assert chaos(place, "validate", "chaos.yaml").returncode == 2, "a scenario names no plugins"


def test_only_what_needs_a_missing_directory_of_the_settings_fails(
    place: Path, chaos: Chaos
) -> None:
    (place / "chaos.yaml").write_text("plugins: [none, mine]\n")
    done = chaos(place, "validate", "outside.yaml")
    assert done.returncode == 0 and "none is not a directory" in done.stderr, done.stderr
    (place / "chaos.yaml").write_text("plugins: [none]\n")
    done = chaos(place, "validate", "outside.yaml")
    assert done.returncode == 2 and "none is not a directory" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("settings", "words", "complaint"),
    [
        (None, ("--plugins", "none"), "none is not a directory"),
        ("plugins: mine", (), "plugins needs a list of directories"),
        ("plugin: [mine]", (), "unknown key 'plugin'; it may have: plugins"),
        (None, ("--plugins", "mine/faults"), "has none of the folders faults, strategies"),
    ],
)
def test_a_wrong_directory_is_refused(
    place: Path, chaos: Chaos, settings: str | None, words: tuple[str, ...], complaint: str
) -> None:
    if settings is not None:
        (place / "chaos.yaml").write_text(settings)
    done = chaos(place, "validate", "outside.yaml", *words)
    assert done.returncode == 2 and complaint in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def broken(:", "SyntaxError"),
        ("X = 1", "must define exactly one public Fault, it defines 0"),
    ],
)
@pytest.mark.sample(1)
def test_a_broken_one_fails_only_what_needs_it(
    place: Path, chaos: Chaos, text: str, why: str
) -> None:
    (place / "mine" / "faults" / "odd_kill.py").write_text(text)
    fine = chaos(place, "validate", "outside.yaml", "--plugins", "mine")
    assert fine.returncode == 0
    assert "plugin faults/odd-kill" in fine.stderr and why in fine.stderr
    (place / "outside.yaml").write_text(SCENARIO.replace("late-kill", "odd-kill"))
    needs = chaos(place, "validate", "outside.yaml", "--plugins", "mine")
    assert needs.returncode == 2
    assert "outside.yaml:6:" in needs.stderr and "cannot be used" in needs.stderr
    assert why in needs.stderr


def test_a_name_that_is_taken_stays_with_whom_it_belongs_to(place: Path, chaos: Chaos) -> None:
    (place / "mine" / "faults" / "process_kill.py").write_text(FAULT)
    done = chaos(place, "list", "faults", "--plugins", "mine", "--format", "json")
    assert {"late-kill", "process-kill"} <= listed(done)["faults"]
    assert "process-kill" in done.stderr and "this project has one of that name" in done.stderr


def test_an_installed_distribution_brings_plugins(place: Path, chaos: Chaos) -> None:
    site = place / "site"
    info = site / "more_faults-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[trainchaos.faults]\nlate-kill = more_faults.late\ngone = more_faults.gone\n"
        "[trainchaos.strategies]\ncalm = more_faults.calm:Calm\n"
    )
    (site / "more_faults").mkdir()
    (site / "more_faults" / "__init__.py").touch()
    (site / "more_faults" / "late.py").write_text(FAULT)
    (site / "more_faults" / "calm.py").write_text(STRATEGY)
    done = chaos(place, "validate", "outside.yaml", path=site)
    assert done.returncode == 0, done.stderr
    assert "plugin faults/gone (package more-faults) is left out" in done.stderr


def test_a_fault_that_does_not_say_so_is_not_taken_for_simulated(place: Path, chaos: Chaos) -> None:
    told = FAULT.rstrip() + "\n\n    simulated: ClassVar[bool] = False\n"
    (place / "mine" / "faults" / "late_kill.py").write_text(told)
    listing = chaos(place, "list", "faults", "--plugins", "mine", "--format", "json")
    rows = {one["name"]: one["columns"]["sim"] for one in json.loads(listing.stdout)["faults"]}
    assert rows["late-kill"] == "-" and rows["process-kill"] == "simulated"
    ran = chaos(place, "run", "outside.yaml", "--plugins", "mine", "--launcher", "sim", "-q")
    assert ran.returncode == 2 and "is not known to act in a simulation" in ran.stderr
