"""Whether a log is its arm's own: checked against the resolved scenario."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.chaos.loading.test_scenarios import FOLDER, loaded, simulate
from tests.support.search.simulate import KILL, RANKS, cell_of
from trainchaos.chaos.loading.overrides import of_option
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.evidence.expected import expected_of
from trainchaos.harness.judge.results import Finding, Results
from trainchaos.harness.judge.verdict.judge import judge

SCENARIO = """\
version: 1
name: repeats
description: two repeats of one cell
launcher: sim
workload: {kind: mlp, ranks: 3, steps: 30, global_batch: 24, checkpoint: {every: 10}}
recovery: {strategy: hot-spare, spares: 1}
faults: [{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 15}}]
repeat: 2
stop_conditions: [{when: "no_committed_step_for > 60s"}]
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    base = tmp_path_factory.mktemp("repeats")
    path = base / "repeats.yaml"
    path.write_text(SCENARIO)
    simulate(loaded(path), base / "runs")
    return RunDirectory((base / "runs" / "repeats" / "latest").resolve())


def _copy(run: RunDirectory, to: Path) -> RunDirectory:
    shutil.copytree(run.root, to)
    return RunDirectory(to)


def _identity(results: Results, arm: str) -> Finding:
    return next(one.invariants["identity"] for one in results.arms if one.id == arm)


@pytest.mark.slow
def test_a_log_that_was_copied_to_another_repeat_is_seen(
    played: RunDirectory, tmp_path: Path
) -> None:
    run = _copy(played, tmp_path / "copied")
    one, other = [name for name in run.arms() if name.endswith("faulted")]
    shutil.rmtree(run.events(other))
    shutil.copytree(run.events(one), run.events(other))
    assert "repeat 0, the scenario 1" in _identity(judge(run), other).witness


@pytest.mark.long
def test_a_replica_that_is_hit_whole_is_planned_whole_when_it_is_read_back(memory: Path) -> None:
    """A resolved scenario holds every default, so that nobody sees whether ``select`` was
    written.
    """
    chosen = [of_option("--launcher", "launcher", "sim"), of_option("--repeat", "repeat", 1)]
    simulate(loaded(FOLDER / "parallel" / "hsdp-replica-kill.yaml", chosen), memory)
    results = judge(RunDirectory((memory / "hsdp-replica-kill" / "latest").resolve()))
    assert {arm.invariants["identity"].verdict for arm in results.arms} == {"pass"}


def _resolved(cell: Cell) -> ResolvedRun:
    return ResolvedRun(run_id="", source="", started="", reproduce="", seed=3, cells=[cell])


def test_what_is_expected_of_an_arm() -> None:
    cell = cell_of({"strategy": "hot-spare", "spares": 2}, [KILL])
    found = expected_of(_resolved(cell), cell, 0, "faulted")
    assert (found.repeat, found.seed, found.spares) == (0, 3, 2)
    assert found.plan is not None and found.plan["kill"]["target"]["ranks"] == [2]
    assert found.plan["kill"]["at"]["points"] == [[33, "backward"]]
    assert found.most == {"kill": 1}
    assert expected_of(_resolved(cell), cell, 0, "control").plan == {}
    assert expected_of(_resolved(cell), cell, 1, "faulted").seed != 3
    assert RANKS == 4


def test_a_scenario_of_another_version_leaves_it_open() -> None:
    cell = cell_of("hot-spare", [{**KILL, "kind": "no-such-fault"}])
    found = expected_of(_resolved(cell), cell, 0, "faulted")
    assert found.plan is None and "no-such-fault" in found.problem
