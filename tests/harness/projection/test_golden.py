"""Published inputs, and how figures of a projection follow from one another: values that no other
test would miss.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from tests.support.pages.sample_results import build
from trainchaos.harness.judge.incident import PhaseSpan
from trainchaos.harness.projection.costs import PUBLISHED, measured
from trainchaos.harness.projection.presets import BYTEROBUST, LLAMA3, PRESETS, mtbf_s
from trainchaos.harness.projection.result import t95


def test_presets_are_as_published() -> None:
    """Failures per 1,000 nodes of 8 GPUs and day."""
    llama3 = 1000 * 419 / (54 * 16_384 / 8)
    assert {name: one.rate for name, one in PRESETS.items()} == {
        "low": 2.34,
        "mid": pytest.approx(llama3),
        "high": 6.50,
        "llama3": pytest.approx(llama3),
        "byterobust": pytest.approx(llama3),
    }
    assert sum(LLAMA3.values()) == 419 and sum(BYTEROBUST.values()) == 55_365
    hours = [mtbf_s(6.50, gpus / 8) / 3600 for gpus in (1024, 16_384, 131_072)]
    assert hours == pytest.approx([28.8, 1.80, 0.225], rel=0.003)


@pytest.mark.parametrize(
    ("strategy", "first_s", "last_s"),
    [("checkpoint-restart", 454.0, 768.0), ("hot-spare", 46.0, 65.0), ("drop-replica", 46.0, 65.0)],
)
def test_published_costs_are_those_at_256_and_at_2048_nodes(
    strategy: str, first_s: float, last_s: float
) -> None:
    cost = PUBLISHED[strategy]
    assert [cost.at(n).median_s for n in (8, 256, 2048)] == pytest.approx(
        [first_s, first_s, last_s]
    )


def test_students_t() -> None:
    """Of any table, for two-sided 95 %."""
    assert [t95(n) for n in (1, 2, 4, 10, 30, 120)] == pytest.approx(
        [12.706, 4.303, 2.776, 2.228, 2.042, 1.980], abs=6e-4
    )


def test_what_runs_measured_is_taken_without_work_done_again_and_as_it_varies(
    tmp_path: Path,
) -> None:
    _, results = build(tmp_path / "run")
    cell = next(cell.id for cell in results.cells if cell.strategy == "hot-spare")
    one = next(one for one in results.faults if one.cell == cell and one.outcome == "recovered")
    stalls = [0.5, 1.0, 2.0, 3.0, 8.0]
    faults = [
        one.model_copy(
            update={
                "repeat": repeat,
                "recovery_time": stall + 7.0,
                "phases": [
                    PhaseSpan(name="regroup", start=0.0, seconds=stall),
                    PhaseSpan(name="redo", start=stall, seconds=7.0),
                ],
            }
        )
        for repeat, stall in enumerate(stalls)
    ]
    cost = measured([results.model_copy(update={"faults": faults})])["hot-spare"]
    sigma = statistics.stdev(map(math.log, stalls))
    assert cost.incidents == 5 and cost.stall.median_s == pytest.approx(
        math.prod(stalls) ** (1 / 5)
    )
    assert cost.stall == cost.stall.__class__(median_s=cost.stall.median_s, sigma=sigma)
    error = math.sqrt(sigma**2 / 5 + sigma**4 / 8)  # of the logarithm of a lognormal mean
    assert cost.unsure == pytest.approx(math.expm1(2.776445 * error))
    few = measured([results.model_copy(update={"faults": faults[:4]})])["hot-spare"]
    assert few.incidents == 4 and few.unsure == 0.0, "how much they vary is not known"
