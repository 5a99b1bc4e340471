"""What a plan expects where many ranks share few processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.planning import crowd

SCENARIO = """\
version: 1
name: crowd
launcher: LAUNCHER
workload: {kind: gpt, size: nano, ranks: RANKS, steps: 20, global_batch: RANKS}
recovery: hot-spare
baseline: none
faults:
  - {id: kill, kind: process-kill, target: {rank: 1}, at: {step: 13}}
stop_conditions: [{when: "no_committed_step_for > 60s"}]
"""


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "cores_here", lambda: 2)


def planned(path: Path, capsys: pytest.CaptureFixture[str], ranks: int, launcher: str) -> list[str]:
    """The headline's last words, and warnings."""
    scenario = path / "crowd.yaml"
    scenario.write_text(SCENARIO.replace("RANKS", str(ranks)).replace("LAUNCHER", launcher))
    assert invoke(["plan", str(scenario)]) == 0
    captured = capsys.readouterr()
    return [captured.out.split("\n", 1)[0].rsplit(" · ", 1)[1], *captured.err.splitlines()]


@pytest.mark.parametrize(("ranks", "measured_s"), [(4, 5.4), (16, 7.9), (40, 15.4), (100, 56.8)])
def test_the_estimate_fits_what_was_measured_to_a_factor_of_two(
    ranks: int,
    measured_s: float,
    two_cores: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wall times of ``chaos run`` on two cores, one run each."""
    takes, *warnings = planned(tmp_path, capsys, ranks, "local")
    number, unit = takes.split()[1:3]
    estimate_s = float(number) * {"s": 1, "min": 60}[unit]
    assert measured_s / 2 <= estimate_s <= measured_s * 2
    assert [f"{ranks} ranks share 2 cores" in each for each in warnings] == [True] * (ranks >= 8)


def test_nothing_is_claimed_of_the_steps_of_a_command(
    two_cores: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "command.yaml"
    lines = SCENARIO.replace("LAUNCHER", "local").splitlines()
    lines[3:5] = ['workload: {command: ["true"], ranks: 100, steps: 20}']
    scenario.write_text("\n".join(lines))
    assert invoke(["plan", str(scenario)]) == 0
    (warning,) = [
        line for line in capsys.readouterr().err.splitlines() if "100 ranks share 2 cores" in line
    ]
    assert "longer" not in warning


def test_ranks_elsewhere_do_not_crowd_this_machine(
    two_cores: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, capsys, 100, "sim") == ["about 5 s (an estimate)"]
