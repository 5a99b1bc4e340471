"""A strategy that goes on with fewer ranks has one repeat with elastic sums, which is compared bit
for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.planning.planview import headline, plan_run
from trainchaos.harness.compare.plan.plan import family_of
from trainchaos.harness.compare.stored import compare_stored
from trainchaos.harness.run.runner import run_scenario

TEXT = """\
version: 1
name: exact
launcher: sim
workload: {kind: gpt, size: nano, ranks: 4, steps: 40, global_batch: 16, checkpoint: {every: 10}}
recovery: drop-replica
faults:
  - {id: kill, kind: process-kill, target: {rank: 2}, at: {step: 15, phase: backward}}
sla: {samples_lost: ["max <= 0"]}
repeat: 3
"""
MATRIX = (
    TEXT.replace("recovery: drop-replica", "recovery: ${matrix.recovery}")
    + "matrix: {recovery: [checkpoint-restart, drop-replica, hot-spare]}\n"
)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read_text(text: str, *overrides: str) -> LoadedScenario:
        path = tmp_path / "exact.yaml"
        path.write_text(text)
        return load(path, build_catalogue(), overrides=overrides)

    return read_text


def test_one_repeat_has_elastic_sums_and_is_held_to_no_sla(read: Any) -> None:
    own, exact = read(TEXT).cells
    assert (own.id, own.exact_for, own.scenario.repeat) == ("default", None, 3)
    assert own.scenario.workload.determinism == "default"
    assert (exact.id, exact.exact_for, exact.params) == (
        "determinism=elastic",
        "default",
        {"determinism": "elastic"},
    )
    scenario = exact.scenario
    assert (scenario.workload.determinism, scenario.repeat, scenario.sla) == ("elastic", 1, {})
    assert scenario.faults == own.scenario.faults


def test_of_a_matrix_only_the_strategy_that_promises_no_exact_result_has_it(read: Any) -> None:
    cells = read(MATRIX).cells
    assert [cell.exact_for for cell in cells] == [None, None, None, "recovery=drop-replica"]
    assert cells[-1].id == "recovery=drop-replica,determinism=elastic"
    assert cells[-1].params == {"recovery": "drop-replica", "determinism": "elastic"}


@pytest.mark.parametrize(
    "override",
    [
        "workload.determinism=default",
        "workload.determinism=elastic",
        "recovery={strategy: drop-replica, batch: shrink}",
        "workload.parallelism={hsdp: {replicas: 2, shards: 2}}",
        "recovery=hot-spare",
        "recovery=checkpoint-restart",
        "baseline=none",
        "faults=[]",
        "invariants=[liveness]",
        "invariants={leave_out: [loss-equality]}",
        "workload={kind: script, params: {path: train.py}, ranks: 4, steps: 40, global_batch: 16}",
    ],
)
def test_none_where_it_shows_nothing_or_the_scenario_decided(read: Any, override: str) -> None:
    assert len(read(TEXT, override).cells) == 1


@pytest.mark.parametrize(
    "override", ["invariants=[loss-equality]", "invariants={leave_out: [liveness]}", "repeat=1"]
)
def test_one_as_long_as_results_are_compared(read: Any, override: str) -> None:
    assert len(read(TEXT, override).cells) == 2


def test_a_cell_asked_for_brings_the_one_beside_it(read: Any) -> None:
    loaded = read(MATRIX)
    found = [cell.id for cell in loaded.chosen(["recovery=drop-replica"])]
    assert found == ["recovery=drop-replica", "recovery=drop-replica,determinism=elastic"]
    assert [cell.id for cell in loaded.chosen(found[1:])] == found[1:]
    assert len(loaded.chosen([])) == 4


def test_the_plan_says_so(read: Any) -> None:
    loaded = read(MATRIX)
    plan = plan_run(loaded, build_catalogue(), seed=None, cells=loaded.cells)
    assert (
        "3 cells x 3 repeats x (faulted, control) + 1 x (faulted, control) with elastic sums = 20"
        " arms" in headline(plan)
    )


def test_a_comparison_plays_the_family_as_it_is(read: Any) -> None:
    loaded = read(TEXT.replace("launcher: sim\n", "").replace("repeat: 3\n", ""))
    assert family_of(loaded.path, loaded.cells).cell == loaded.cells[0]


@pytest.mark.slow
def test_a_run_is_compared_bit_for_bit(read: Any, tmp_path: Path) -> None:
    loaded = read(TEXT, "repeat=1")
    results = run_scenario(
        loaded, runs=tmp_path / "runs", seed=None, live=False, argv=["run", str(loaded.path)]
    )
    assert results.verdict == "pass", results.reason
    assert {cell.id: cell.exactness for cell in results.cells} == {
        "default": "within the control band",
        "determinism=elastic": "bit for bit",
    }
    assert [cell.label for cell in results.cells] == [
        "drop-replica",
        "drop-replica determinism=elastic",
    ]
    assert not any(sla.cell == "determinism=elastic" for sla in results.slas)
    assert [cell.id for cell in results.timed] == ["default"], (
        "its figures are compared with nobody's"
    )
    run = tmp_path / "runs/exact" / results.run_id
    compared = compare_stored([run], name="stored", argv=[], price=None, currency="EUR")
    assert [trial.label for trial in compared.trials] == ["drop-replica"]
