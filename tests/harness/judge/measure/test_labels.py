"""Cells of one strategy are told apart, by the least that does it, in every report and
comparison.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands.unreported import unreported
from tests.support.pages.sample_results import build
from trainchaos import reports
from trainchaos.harness.compare.stored import compare_stored
from trainchaos.harness.judge.measure.labels import CellIdentity, labels
from trainchaos.reports.outlets.terminal import summary

SPARES = {"strategy": "hot-spare", "spares": 2, "rebalance": True}
ELASTIC = {"strategy": "drop-replica", "elastic": True}


def named(*cells: tuple[str, dict[str, Any]]) -> list[str]:
    """Labels of cells, each a strategy and what the matrix chose."""
    given = [
        CellIdentity(id=f"cell-{n}", strategy=name, params=params)
        for n, (name, params) in enumerate(cells)
    ]
    found = labels(given)
    assert list(found) == [one.id for one in given] and len(set(found.values())) == len(given)
    return list(found.values())


def of(*values: Any) -> list[tuple[str, dict[str, Any]]]:
    """Cells of a matrix over the recovery alone."""
    return [(v["strategy"] if isinstance(v, dict) else v, {"recovery": v}) for v in values]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([("none", {})], ["none"]),
        (of("hot-spare", "drop-replica"), ["hot-spare", "drop-replica"]),
        (of("drop-replica", ELASTIC), ["drop-replica", "drop-replica elastic=true"]),
        (of(SPARES, "drop-replica"), ["hot-spare", "drop-replica"]),
        (of(SPARES, SPARES | {"spares": 1}), ["hot-spare spares=2", "hot-spare spares=1"]),
        (
            of(
                {"strategy": "a", "x": 1, "y": 1},
                {"strategy": "a", "x": 1, "y": 2},
                {"strategy": "a", "x": 2, "y": 2},
            ),
            ["a x=1 y=1", "a x=1 y=2", "a x=2 y=2"],
        ),
        (
            of(
                {"strategy": "a", "memory": {"peers": 1}}, {"strategy": "a", "memory": {"peers": 2}}
            ),
            ["a memory.peers=1", "a memory.peers=2"],
        ),
        (
            [(name, {"recovery": name, "ranks": n}) for name in "ab" for n in (2, 4)],
            ["a ranks=2", "a ranks=4", "b ranks=2", "b ranks=4"],
        ),
        (
            [("a", {"how": "a", "ranks": 2}), ("b", {"how": "b", "ranks": 4})],
            ["a ranks=2", "b ranks=4"],
        ),
        ([("a", {"recovery": "a", "ranks": 2}), ("b", {"recovery": "b", "ranks": 2})], ["a", "b"]),
        ([("a", {"text": "x" * 60}), ("a", {"text": "x" * 61})], ["cell-0", "cell-1"]),
    ],
)
def test_a_label_is_the_least_that_tells_cells_apart(
    cells: list[tuple[str, dict[str, Any]]], expected: list[str]
) -> None:
    assert named(*cells) == expected


@pytest.mark.long
def test_every_report_tells_two_cells_of_one_strategy_apart(tmp_path: Path) -> None:
    run, results = build(tmp_path / "run")
    changed = []
    for cell, spares in zip(results.cells, (1, 2, 3), strict=False):
        told = {"strategy": "hot-spare", "label": f"hot-spare spares={spares}"}
        changed.append(cell.model_copy(update=told))
    results = results.model_copy(update={"cells": changed})
    reports.render_all(run, results)
    page, text = (run.root / "report.html").read_text(), (run.root / "summary.md").read_text()
    for spares in range(1, len(changed) + 1):
        label = f"hot-spare spares={spares}"
        assert f"| {label} |" in text and label in summary(results, run)
        # the tables of strategies, phases and metrics, and the words of the charts
        assert page.count(label) >= 6


@pytest.mark.slow
def test_stored_runs_of_one_strategy_are_not_taken_for_one(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        """version: 1
name: stored
launcher: sim
workload: {kind: mlp, ranks: 4, steps: 20, global_batch: 24, checkpoint: {every: 10}}
recovery: ${matrix.recovery}
faults: [{id: kill, kind: process-kill, target: {rank: 2}, at: {step: 13}}]
matrix: {recovery: [{strategy: hot-spare, spares: 1}, {strategy: hot-spare, spares: 2}]}
"""
    )
    unreported(["run", str(path), "--runs", str(tmp_path / "runs"), "--seed", "5", "-q"])
    made = compare_stored(
        [tmp_path / "runs" / "stored" / "latest"], name="x", argv=[], price=None, currency="USD"
    )
    assert [stack.label for stack in made.stacks] == ["hot-spare spares=1", "hot-spare spares=2"]
    assert [trial.ranks for trial in made.trials] == [5, 6]
    results = json.loads((tmp_path / "runs" / "stored" / "latest" / "results.json").read_text())
    assert [cell["label"] for cell in results["cells"]] == [
        "hot-spare spares=1",
        "hot-spare spares=2",
    ]
