"""The fault that CONTRIBUTING.md adds is complete as it stands there: it is found, lands and is
recovered from.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import tests.faultcases
from tests.support.fault_fakes import OCCURRENCE, FaultCase
from trainchaos.chaos import faults, plugins
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.fault.base import Fault
from trainchaos.harness.fuzz.play.oracle import find_in
from trainchaos.harness.fuzz.play.play import SimPlayer

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.compile(r"^`(\S+)`, [^\n]*\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """The files of the section, by their names, where plugins are looked for."""
    files = {}
    for name, text in BLOCKS.findall((ROOT / "CONTRIBUTING.md").read_text()):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        files[path.name] = path
    for package in (faults, tests.faultcases):
        here = tmp_path / package.__name__.removeprefix("trainchaos.").replace(".", "/")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(here)])
    plugins.forget()
    yield files
    plugins.forget()
    for package in (faults, tests.faultcases):
        sys.modules.pop(f"{package.__name__}.late_kill", None)


def test_the_section_adds_these_files(added: dict[str, Path]) -> None:
    # the fault and how it is tried share a name
    assert sorted(added) == ["late-kill.yaml", "late_kill.py"]


def test_its_python_passes_the_linter(added: dict[str, Path]) -> None:
    pytest.importorskip("ruff")
    blocks = [str(path) for path in added.values() if path.suffix == ".py"]
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", ROOT / "pyproject.toml", *blocks],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_fault_is_found_and_its_evidence_told_apart(added: dict[str, Path]) -> None:
    fault = plugins.load(plugins.FAULTS, Fault)["late-kill"]()
    case: FaultCase = importlib.import_module("tests.faultcases.late_kill").CASE
    assert fault.landed(OCCURRENCE, case.evidence) is not None
    for events in case.elsewhere:
        assert fault.landed(OCCURRENCE, events) is None


def test_its_scenario_is_recovered_from_in_simulation(added: dict[str, Path]) -> None:
    tree = YAML(typ="safe", pure=True).load(added["late-kill.yaml"])
    tree["launcher"] = {"kind": "sim"}
    played = SimPlayer(catalogue=build_catalogue()).play(tree)
    assert (played.refused, played.crash, find_in(tree, played)) == ("", "", None)
    assert played.findings["faulted: fault-landed"].verdict == "pass", played.findings
    assert {finding.verdict for finding in played.findings.values()} == {"pass"}
