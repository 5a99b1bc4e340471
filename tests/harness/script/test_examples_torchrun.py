"""The torchrun examples by their README lines, for real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

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


@pytest.mark.soak
@pytest.mark.parametrize("line", LINES)
def test_it_recovers_and_passes(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = invoke([*shlex.split(line), "--runs", str(tmp_path), "--quiet"])
    (path,) = tmp_path.glob("*/latest/results.json")
    results = Results.model_validate_json(path.read_text())
    assert code == 0, results.reason
    assert [incident.outcome for incident in results.faults] == ["recovered"]
