"""Every scenario that comes with the project: complete, valid, and run to its outcome in
simulation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from trainchaos.chaos import cli, plugins
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.loading.checks import normalise
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.loading.overrides import of_option
from trainchaos.chaos.planning import planview
from trainchaos.chaos.scenario.model import TriggerSpec
from trainchaos.chaos.scenario.schema import scenario_schema
from trainchaos.chaos.source.source import read_document
from trainchaos.harness.judge.results import Results
from trainchaos.harness.run.runner import run_scenario

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "scenarios"
FILES = sorted(path for path in FOLDER.rglob("*.yaml") if path.parent.name != "regressions")
NAMES = [str(path.relative_to(FOLDER)) for path in FILES]
EXIT_TAG = "exit-"
"""A tag ``exit-3`` says that the scenario ends so, and its description says why."""
OF_LONG_JOBS = ("projection",)
"""Folders whose jobs have thousands of steps: a minute each, even in simulation."""
SIM_EXIT_TAG = "sim-exit-"
"""The same of its simulation alone, which goes before ``exit-``."""


@cache
def catalogue() -> Any:
    return cli.build_catalogue()


@cache
def validator() -> Any:
    return jsonschema.Draft202012Validator(scenario_schema(catalogue()))


def loaded(path: Path, overrides: Sequence[Any] = ()) -> LoadedScenario:
    return load(path, catalogue(), overrides=overrides, env={})


def expected_exit(scenario: LoadedScenario) -> int:
    """The exit code that it ends with in simulation."""
    tags = scenario.cells[0].scenario.tags
    for prefix in (SIM_EXIT_TAG, EXIT_TAG):
        for tag in tags:
            if tag.startswith(prefix):
                return int(tag.removeprefix(prefix))
    return 0


def test_there_are_enough() -> None:
    assert len(FILES) >= 25
    assert (FOLDER / "kill-one-rank.yaml") in FILES


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_it_says_what_it_shows_and_is_valid(path: Path) -> None:
    depth = "../" * (len(path.relative_to(FOLDER).parts) - 1)
    first = path.read_text().split("\n", 1)[0]
    assert first == f"# yaml-language-server: $schema={depth}scenario.schema.json"
    own = read_document(path).tree
    assert own["name"] == path.stem
    assert len(str(own.get("description", ""))) > 30 and own.get("tags")
    scenario = loaded(path)
    assert scenario.warnings == (), "a scenario of ours must not be warned of"
    assert scenario.cells[0].scenario.stop_conditions, "a scenario of ours ends by itself"
    planned = planview.plan_run(scenario, catalogue(), seed=None, cells=scenario.cells)
    assert all(fault.id in planview.as_text(planned) for fault in scenario.cells[0].scenario.faults)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_an_editor_finds_nothing_wrong_with_it(path: Path) -> None:
    tree = YAML(typ="safe", pure=True).load(path)
    assert [error.message for error in validator().iter_errors(tree)] == []


@pytest.mark.parametrize("kind", plugins.load(plugins.FAULTS, Fault))
def test_every_fault_is_shown_by_a_scenario(kind: str) -> None:
    assert any(f"kind: {kind}" in path.read_text() for path in FILES)


def test_names_are_unique() -> None:
    # a comparison names families of faults as those of single runs are named
    for compared in (False, True):
        stems = [path.stem for path in FILES if (path.parent.name == "compare") is compared]
        assert sorted(set(stems)) == sorted(stems)


def exit_tagged(path: Path) -> bool:
    tags = read_document(path).tree.get("tags", [])
    return any(str(tag).startswith((EXIT_TAG, SIM_EXIT_TAG)) for tag in tags)


def in_test(path: Path) -> bool:
    """Simulated in ``make test``: one of each folder, and those that do not end well; all are in
    ``make test-all``.
    """
    first = path == min(one for one in FILES if one.parent == path.parent)
    return (first or exit_tagged(path)) and path.parent.name not in OF_LONG_JOBS


PLAYED = [
    pytest.param(path, id=n, marks=() if in_test(path) else pytest.mark.long)
    for path, n in zip(FILES, NAMES, strict=True)
]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("path", PLAYED)
def test_it_runs_to_its_outcome_in_simulation(path: Path, memory: Path) -> None:
    scenario = loaded(
        path, [of_option("--launcher", "launcher", "sim"), of_option("--repeat", "repeat", 1)]
    )
    if any(cell.scenario.workload.command for cell in scenario.cells):
        pytest.skip("a command is not simulated")
    results = simulate(scenario, memory)
    seen = [
        f"{c.id}: {n}: {f.witness}"
        for c in results.cells
        for n, f in c.invariants.items()
        if f.verdict != "pass"
    ]
    assert results.exit_code == expected_exit(scenario), "\n".join([results.reason, *seen])


def simulate(scenario: LoadedScenario, runs: Path) -> Results:
    return run_scenario(
        scenario, runs=runs, seed=None, live=False, argv=["run", str(scenario.path)]
    )


def test_every_trigger_of_the_page_is_read() -> None:
    page = (ROOT / "docs" / "scenarios.md").read_text()
    table = page.split("## When", 1)[1].split("\n\n", 3)[1]
    found = [
        snippet
        for line in table.splitlines()[2:]
        for snippet in re.findall(r"`({.*?})`", line.split("|")[1])
    ]
    assert len(found) >= 8
    for snippet in found:
        assert TriggerSpec.model_validate(YAML(typ="safe", pure=True).load(snippet))


@pytest.mark.parametrize("written", ["9", "9s", "9.0", "0.15min"])
def test_a_time_in_whole_seconds_is_a_whole_number(written: str) -> None:
    params = {"grace_s": YAML(typ="safe", pure=True).load(written)}
    tree, problems = normalise({"launcher": {"kind": "slurm", "params": params}}, catalogue())
    assert not problems and repr(tree["launcher"]["params"]["grace_s"]) == "9"
