"""Metrics and rates against computations of their own: table values, exact rational sums, counts of
another tool.
"""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import arms
from tests.support.arms import control
from tests.support.logs import Script
from tests.support.search.simulate import cell_of, play
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.plugins import load
from trainchaos.chaos.stats import clopper_pearson
from trainchaos.harness import workloads
from trainchaos.harness.compare.result.model import CellSummary, Trial
from trainchaos.harness.judge.measure.cost import failure_cost
from trainchaos.harness.judge.measure.flops import PEAK_TFLOPS, mfu, peak_of, work_of
from trainchaos.harness.judge.measure.measure import measure, summarise
from trainchaos.harness.judge.measure.reliability import (
    false_alarms,
    spares_of,
    survival,
)
from trainchaos.harness.judge.measure.samples import per_arm, quantile
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.launch.workload import Workload

ROOT = Path(__file__).resolve().parents[4]


# --- costs, quantiles


@pytest.mark.parametrize(
    ("seconds", "hours"), [(3600.0, 5.0), (None, 0.0), (math.inf, math.inf), (1.8, 0.0025)]
)
def test_a_failure_costs_what_was_provisioned_for_as_long(
    seconds: float | None, hours: float
) -> None:
    assert failure_cost(5, seconds) == pytest.approx(hours)


def test_a_run_and_a_comparison_count_the_cost_alike() -> None:
    from trainchaos.harness.compare.result import summary

    assert (
        summary.failure_cost is failure_cost and {"ranks", "recovery"} <= Trial.model_fields.keys()
    )
    found = measure(arms.hot_spare().log(), control("hot-spare", spares=1).log())
    (incident,) = found.incidents
    assert found.values["failure_cost"] == [
        pytest.approx(5 * (incident.recovery_time or 0.0) / 3600)
    ]


def test_quantiles_are_of_arms_and_need_enough_of_them() -> None:
    values = [float(n) for n in range(1, 60)]
    found = summarise("recovery_time", values)
    assert (found.p95, found.p99) == (57.0, None)  # the 57th of 59: ceil(0.95 x 59)
    assert summarise("recovery_time", values[:58]).p95 is None
    assert summarise("recovery_time", values * 2, arms=list(range(59)) * 2).p95 == 57.0
    assert summarise("recovery_time", values, arms=[n // 2 for n in range(59)]).p95 is None
    assert quantile([1.0] * 298, "p99") is None and quantile([1.0] * 299, "p99") == 1.0
    assert per_arm([1.0, 2.0, 9.0], [0, 0, 1]) == [1.5, 9.0]


# --- whole again


def test_what_takes_nobody_away_has_nothing_to_restore(memory: Path) -> None:
    slow = {
        "id": "slow",
        "kind": "straggler",
        "params": {"factor": 2},
        "target": {"rank": 2},
        "at": {"step": 27},
        "duration": {"steps": 4},
    }
    found = measure(play(cell_of("hot-spare", [slow]), memory, seed=3).log, None)
    assert found.incidents[0].outcome == "masked"
    assert found.values["time_to_redundancy"] == [] and found.values["failure_cost"] == [0.0]


# --- rates over arms


def test_survivors_are_counted_of_the_arms_that_say_something() -> None:
    well = measure(arms.hot_spare().log(), None)
    gave_up = measure(arms.interrupted("checkpoint-restart").finish("gave-up").log(), None)
    cut = measure(arms.interrupted("checkpoint-restart").finish("interrupted").log(), None)
    found = survival([well, well, well, gave_up, cut])
    assert (found.arms, found.survived, found.probability) == (4, 3, 0.75)
    assert (found.low, found.high) == clopper_pearson(3, 4)
    nobody = survival([cut])
    assert (nobody.arms, nobody.probability, nobody.low, nobody.high) == (0, None, 0.0, 1.0)


def suspected(cause: str) -> Script:
    """A control arm in which rank 2 is declared failed after a while."""
    script = Script("hot-spare", arm="control")
    script.spawn("w0")
    for name in ("w1", "w2", "w3"):
        script.spawn(name)
    script.form(("w0", "w1", "w2", "w3"), state="initial", cause="start", resume=0)
    script.train(10)
    arms.fail(script, cause=cause)
    return script.finish("gave-up")


def test_false_alarms_come_with_the_hours_they_were_looked_for_in() -> None:
    quiet, faulted = history_of(control("hot-spare").log()), history_of(arms.hot_spare().log())
    injected = next(iter(faulted.log.of(Kind.FAULT_INJECTED)))
    hours = (quiet.wall_s * 4 + (injected.time_ns - faulted.start_ns) / 1e9 * 4) / 3600
    none = false_alarms([quiet], [faulted])
    assert none.count == 0 and none.rate == 0.0 and none.rank_hours == pytest.approx(hours)
    assert none.upper == pytest.approx(2.9957 / hours, rel=1e-4), "none in two seconds is not never"
    alarmed = history_of(suspected("hang").log())
    one = false_alarms([alarmed], [])
    assert one.count == 1 and one.rate == pytest.approx(1 / one.rank_hours)
    assert one.upper == pytest.approx(4.7439 / one.rank_hours, rel=1e-4)
    assert false_alarms([history_of(suspected("exit").log())], []).count == 0, "it did end"
    assert false_alarms([], []).rate is None


def test_what_a_waiting_spare_takes_is_what_it_says_at_its_end() -> None:
    script = control("hot-spare", spares=1)
    end = next(
        line for line in script.lines if line.actor == "s0" and line.kind is Kind.ACTOR_ENDED
    )
    end.data.update(peak_rss_bytes=256 * 2**20, cpu_s=0.25)
    trained = next(
        line for line in script.lines if line.actor == "w0" and line.kind is Kind.ACTOR_ENDED
    )
    trained.data.update(peak_rss_bytes=999 * 2**20, cpu_s=99.0)
    history = history_of(script.log())
    found = spares_of([history])
    spawned = next(e for e in history.log.of(Kind.PROCESS_SPAWNED) if e.data["process"] == "s0")
    assert (found.provisioned, found.measured, found.memory_mib) == (1, 1, 256.0)
    assert found.cores == pytest.approx(0.25 / ((end.time_ns - spawned.time_ns) / 1e9))
    assert found.idle_rank_hours == pytest.approx(history.wall_s / 3600)
    assert found.share == pytest.approx(1 / 5)
    used = arms.hot_spare()  # its spare trained: what it took in all is no price of waiting
    next(x for x in used.lines if x.actor == "s0" and x.kind is Kind.ACTOR_ENDED).data.update(
        end.data
    )
    assert spares_of([history_of(used.log())]).measured == 0
    older = spares_of([history_of(control("hot-spare", spares=1).log())])
    assert (older.measured, older.memory_mib, older.cores) == (0, None, None)


# --- operations


@pytest.mark.parametrize(("kind", "shape"), [("gpt", (1, 65)), ("mlp", (1, 33))])
def test_operations_of_a_sample_are_those_that_torch_counts(
    kind: str, shape: tuple[int, int]
) -> None:
    """Products of matrices as torch's own counter has them, forward; attention's two by hand where
    a fused kernel hides them. Backward takes twice as many.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from trainchaos.harness.workloads._transformer import Transformer
    from trainchaos.harness.workloads.gpt import SIZES
    from trainchaos.harness.workloads.mlp import FEATURES, WIDTHS

    width, size = WIDTHS["nano"], SIZES["nano"]
    if kind == "mlp":
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, width),
            torch.nn.Linear(width, width),
            torch.nn.Linear(width, 1),
        )
        inputs, hidden = torch.zeros(1, FEATURES), 0
    else:
        model = Transformer(
            vocabulary=256,
            layers=size.layers,
            heads=size.heads,
            width=size.width,
            block=size.block,
            dropout=0.0,
        )
        inputs = torch.zeros(1, size.block, dtype=torch.int64)
        hidden = size.layers * 2 * 2 * size.block * size.block * size.width
    with FlopCounterMode(display=False) as counter:
        model(inputs)
    counted: Mapping[Any, int] = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in counted.items() if "attention" not in str(name))
    stated = load(workloads.__name__, Workload)[kind]().flops_per_sample()
    assert stated == 3 * (products + hidden)


def test_utilisation_by_hand() -> None:
    # 1e9 operations a sample, 64 samples in 0.1 s, on two devices of 1 TFLOP/s: 64e9 / (0.1 x 2e12)
    assert mfu(1e9, 64, 0.1, 2e12) == pytest.approx(0.32)


def test_without_a_stated_peak_there_is_no_utilisation_and_a_reason() -> None:
    assert work_of(cell_of("hot-spare", []).scenario, {}) == "no peak is stated for processors"
    scenario = cell_of("hot-spare", []).scenario
    on_gpu = scenario.model_copy(
        update={
            "workload": scenario.workload.model_copy(update={"device": "cuda"}),
            "launcher": scenario.launcher.model_copy(update={"kind": "local"}),
        }
    )
    assert (
        work_of(on_gpu, {"cuda_devices": ["Strange 9000"]}) == "no peak is stated for Strange 9000"
    )
    known = work_of(on_gpu, {"cuda_devices": ["NVIDIA H200"] * 2})
    assert isinstance(known, tuple) and known[1] == pytest.approx(2 * 66.9e12)
    assert peak_of("NVIDIA H100 PCIe") == pytest.approx(51.2e12) != peak_of("NVIDIA H100 80GB HBM3")
    assert (
        peak_of("NVIDIA A100-SXM4-80GB") == pytest.approx(19.5e12)
        and peak_of("A1000 thing") is None
    )
    assert all(0 < tflops < 1000 for tflops in PEAK_TFLOPS.values())


# --- the page of definitions


def test_every_metric_has_a_formula_and_the_page_is_up_to_date() -> None:
    kept = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    page = runpy.run_path(str(ROOT / "docs" / "site" / "metrics.py"))["page"]()
    assert kept == page, "make it again: python docs/site/metrics.py > docs/metrics.md"
    compared = kept.split("## Of a comparison")[1].split("\n## ")[0]
    stated = {name.replace(" ", "_") for name in re.findall(r"- \*\*([\w ]+)\*\*:", compared)}
    numbers = {"recovery", "detection", "goodput", "samples_lost", "ettr", "overhead", "survival"}
    assert numbers <= stated and numbers <= CellSummary.model_fields.keys()
