"""The torchrun examples by their README lines, for real."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.decided import decided
from trainchaos.chaos.cli import invoke
from trainchaos.harness.judge.results import Results

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
READMES = [ROOT / "examples" / name / "README.md" for name in ("torchrun_ddp", "torchrun_beacon")]
LINES = [
    line
    for path in READMES
    for line in re.findall(r"^    chaos (run [^\s#]+)", path.read_text(), re.MULTILINE)
]


def test_there_is_a_line_for_every_scenario() -> None:
    named = {ROOT / line.split()[1] for line in LINES}
    assert named == {path for readme in READMES for path in readme.parent.glob("*.yaml")}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", ["README.md", "docs/scripts.md"])
def test_the_first_scenario_for_a_script_of_ones_own_passes_as_it_stands(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a script such as its readers have: a checkpoint now and then, and a line a step."""
    found = re.findall(r"^```yaml\n(version: 1\n.*?)^```", (ROOT / text).read_text(), re.M | re.S)
    own = next(one for one in found if "command:" in one)
    (tmp_path / "my-job.yaml").write_text(own)
    (tmp_path / "train.py").write_bytes((ROOT / "examples/torchrun_ddp/train.py").read_bytes())
    for name, value in {
        "STEPS": "200",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    code = decided("my-job.yaml", "runs")
    (path,) = tmp_path.glob("runs/*/latest/results.json")
    results = Results.model_validate_json(path.read_text())
    assert code == 0, results.reason
    assert [incident.outcome for incident in results.faults] == ["recovered"]


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_it_recovers_and_passes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = invoke([*shlex.split(line), "--runs", str(tmp_path), "--quiet"])
    (path,) = tmp_path.glob("*/latest/results.json")
    results = Results.model_validate_json(path.read_text())
    assert code == 0, results.reason
    assert [incident.outcome for incident in results.faults] == ["recovered"]
