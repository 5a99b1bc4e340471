"""After each judgement all reports of a run state the same verdict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.gating.test_gate_cli import SCENARIO as GATED
from trainchaos.chaos.cli import invoke

SCENARIO = GATED.replace("LIMIT", "60s").replace("repeat: 5", "repeat: 3")


def verdicts(run: Path) -> dict[str, str]:
    """File -> the verdict that it states."""
    stated = {
        "summary.md": r"## \S+ (\w+)",
        "report.html": r"<title>(\w+)",
        "junit.xml": r'name="verdict" value="(\w+)',
        "metrics.prom": r'run_verdict\{[^}]*verdict="(\w+)"[^}]*\} 1$',
    }
    found = {name: re.search(how, (run / name).read_text(), re.M) for name, how in stated.items()}
    return {name: one[1].lower() if one else "none" for name, one in found.items()}


def test_all_reports_say_what_was_judged_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "judged.yaml"
    scenario.write_text(SCENARIO)
    assert invoke(["run", str(scenario), "--runs", str(tmp_path), "-q"]) == 0
    run = (tmp_path / "gated" / "latest").resolve()
    assert {*verdicts(run).values()} == {"pass"}
    assert invoke(["gate", str(run), "-q"]) == 3  # three arms are no bound of a median
    assert {*verdicts(run).values()} == {"inconclusive"}, verdicts(run)
    assert (run / "summary.md").read_text() == (run / "gate.md").read_text()
    assert (run / "junit.xml").read_text() == (run / "gate.xml").read_text()
    assert "gate.json" not in capsys.readouterr().err
    assert invoke(["analyze", str(run), "-q"]) == 0
    assert {*verdicts(run).values()} == {"pass"}, verdicts(run)
    assert "older than this verdict" not in capsys.readouterr().err
    log = max((run / "events").glob("*faulted/w*.jsonl"))
    log.write_text(log.read_text() + "\n")
    assert invoke(["analyze", str(run), "-q"]) == 3
    assert {*verdicts(run).values()} == {"inconclusive"}, verdicts(run)
    assert "gate.json, gate.xml and gate.md are older than this verdict" in capsys.readouterr().err
