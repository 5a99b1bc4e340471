"""Curves, and the sizes at which one strategy overtakes another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.harness.projection.test_project_cli import chaos
from trainchaos.harness.projection import breakeven
from trainchaos.harness.projection.breakeven import break_even, curve, sizes
from trainchaos.harness.projection.costs import PUBLISHED, RecoveryCost, lasting
from trainchaos.harness.projection.job import formula, job_of
from trainchaos.harness.projection.laws import Duration
from trainchaos.harness.projection.projection import project
from trainchaos.harness.projection.result import BreakEven, Definitions, Point, Projection, Setting
from trainchaos.reports.projection import page, words

__all__ = ["chaos"]  # the fixture


def flat(strategy: str, stall_s: float) -> RecoveryCost:
    """Takes the same at each size."""
    return replace(
        PUBLISHED[strategy], stall=Duration(median_s=stall_s), per_doubling_s=0.0, kind="given"
    )


def projected(costs: dict[str, RecoveryCost] | None = None, **more: Any) -> Projection:
    usual: dict[str, Any] = {"gpus": (4096,), "rate": 6.5, "days": 20, "trials": 40}
    return project(Setting(**{**usual, **more}), costs or PUBLISHED, "a test")


def apart(found: Projection, costs: dict[str, RecoveryCost], gpus: int) -> float:
    """Goodput of hot-spare less checkpoint-restart's."""
    first, second = (
        formula(found.setting, job_of(found.setting, gpus, costs[name]))[0]
        for name in ("hot-spare", "checkpoint-restart")
    )
    assert first is not None and second is not None
    return first - second


def test_a_size_has_a_curve_of_all_others() -> None:
    found = projected()
    assert {point.gpus for point in found.curve} == {*sizes(16, 131_072)} - {4096}
    for name in PUBLISHED:
        points = [point for point in found.curve if point.strategy == name]
        assert len(points) == 13 and all(point.by == "formula" for point in points)
        job = job_of(found.setting, 131_072, PUBLISHED[name])
        assert points[-1].goodput == pytest.approx(formula(found.setting, job)[0])
    assert "other sizes: by the formulas" in page.render(found)
    assert {point.gpus for point in projected(spares=100).curve} == {*sizes(800, 131_072)} - {4096}


def test_where_a_spare_begins_to_pay_is_known_to_a_node() -> None:
    """On small jobs its price is more than it saves."""
    found = projected()
    change = next(one for one in found.break_even if one.above == "hot-spare")
    assert change.below == "checkpoint-restart"
    assert change.by == "formula" and change.low < change.gpus <= change.high
    costs = dict(PUBLISHED)
    assert apart(found, costs, change.gpus) > 0 >= apart(found, costs, change.gpus - 8)
    said = words.findings(found)
    assert (
        f"hot-spare overtakes checkpoint-restart at about {change.gpus:,} GPUs,"
        " by the formulas and costs as they are." in said
    )


@pytest.mark.slow
def test_strategies_that_chance_alone_parts_do_not_overtake() -> None:
    """Two that are alike: by formula no tie is broken, nor by simulations within their error."""
    alike = {name: flat(name, 60.0) for name in ("hot-spare", "drop-replica")}
    assert projected(alike, spares=0).break_even == []
    always = Definitions(failures_while="always")
    few = {"spares": 0, "gpus": (1024, 4096), "gpus_per_node": 1024}
    assert projected(alike, definitions=always, **few).break_even == []


def test_a_strategy_that_is_always_ahead_is_said() -> None:
    costs = {
        "hot-spare": flat("hot-spare", 1.0),
        "checkpoint-restart": flat("checkpoint-restart", 900.0),
    }
    found = projected(costs, definitions=Definitions(spares_count=False))
    assert found.break_even == []
    said = words.findings(found)
    assert "hot-spare is ahead of the others from 16 to 131,072 GPUs." in said
    assert not any("is ahead of the others" in line for line in words.findings(projected()))


def test_sizes_that_have_no_formula_and_too_many_failures_have_no_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(breakeven, "MOST_EVENTS", 30)
    setting = Setting(
        gpus=(64,), rate=6.5, days=20, trials=5, definitions=Definitions(failures_while="always")
    )
    points, parts = curve(setting, PUBLISHED)
    assert not points and parts and max(part.gpus for part in parts) < 8192
    assert {part.setting.trials for part in parts} == {5}


def overtaken(error: float, sizes: Sequence[int], shares: Sequence[float]) -> list[BreakEven]:
    """Where drop-replica, with these shares by simulation, and hot-spare, with 0.8, change."""
    all_ = {"hot-spare": [0.8] * len(sizes), "drop-replica": shares}
    points = [
        Point(strategy=name, gpus=gpus, goodput=share, error=error, by="simulation")
        for name, each in all_.items()
        for gpus, share in zip(sizes, each, strict=True)
    ]
    return break_even(
        Setting(gpus=(64,), rate=6.5), {name: flat(name, 60.0) for name in all_}, [], points
    )


def test_between_two_simulations_a_line_over_the_logarithm_of_gpus_is_taken() -> None:
    """0.1 ahead at 1,024 and 0.3 behind at 4,096: a quarter of two doublings. Half as sure it is
    nowhere.
    """
    (found,) = overtaken(0.02, (1024, 4096), (0.9, 0.5))
    assert (found.below, found.above) == ("drop-replica", "hot-spare")
    assert found.gpus == round(1024 * 2**0.5) and (found.low, found.high) == (1024, 4096)
    assert overtaken(0.04, (1024, 4096), (0.9, 0.5)) == []


def test_whoever_is_ahead_by_chance_or_by_what_is_unknown_is_not_ahead_beyond_doubt() -> None:
    free = Definitions(failures_while="always", spares_count=False)
    alike = {name: flat(name, 60.0) for name in ("hot-spare", "drop-replica")}
    found = projected(alike, spares=0, definitions=free, gpus=(131_072,), gpus_per_node=1024)
    assert not any("is ahead of the others" in line for line in words.findings(found))
    assert "alike" in words.headline(found)
    logs = [math.log(60.0) + 1.0 * k for k in (-1.5, -1.0, -0.5, 0.5, 1.0, 1.5)]
    close = {
        "hot-spare": seen("hot-spare", logs),
        "drop-replica": seen("drop-replica", [one + 0.3 for one in logs]),
    }
    free = Definitions(spares_count=False)
    every = projected(close, spares=0, definitions=free)
    # at 8 GPUs, a node, both stand still
    larger = [point for point in every.curve if point.gpus > 8]
    doubtful = every.model_copy(update={"curve": larger})
    (said,) = (line for line in words.findings(doubtful) if "is ahead of the others" in line)
    assert said.endswith("GPUs, not beyond doubt.")
    assert words.headline(doubtful).endswith("in 20 days, not beyond doubt")


def seen(strategy: str, logs: Sequence[float]) -> RecoveryCost:
    """Measured: so many recoveries, of which the logarithms of the seconds are given."""
    stall = lasting([math.exp(one) for one in logs])
    return replace(flat(strategy, 1.0), stall=stall, kind="measured", incidents=len(logs))


def change_of(costs: dict[str, RecoveryCost]) -> BreakEven | None:
    """Where a spare overtakes dropping a replica, by the formulas at each size."""
    setting = Setting(gpus=(64,), rate=6.5, spares=4)
    found = break_even(setting, costs, [], curve(setting, costs)[0])
    return next((one for one in found if one.above == "hot-spare"), None)


def test_a_break_even_is_as_unsure_as_the_costs_that_it_is_of() -> None:
    """In 95 of 100 series of measurements, the size by the true costs is within its interval."""
    truth = {"hot-spare": 20.0, "drop-replica": 400.0}
    exact = change_of({name: flat(name, s * math.exp(0.125)) for name, s in truth.items()})
    assert exact is not None and exact.least == exact.gpus == exact.most
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(100):
        logs = {name: random.normal(math.log(s), 0.5, 12) for name, s in truth.items()}
        one = change_of({name: seen(name, list(logs[name])) for name in truth})
        assert one is not None and (one.least or 0) <= one.gpus <= (one.most or one.gpus)
        inside += (one.least or 0) <= exact.gpus <= (one.most or math.inf)
    assert 92 <= inside <= 99


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [
        (2048, 4096, "(95 %: 2,048 to 4,096), by the formulas."),
        (2048, None, "(95 %: 2,048 or more), by the formulas."),
        (None, 4096, "(95 %: up to 4,096), by the formulas."),
        (None, None, "(95 %: at any size), by the formulas."),
        (3000, 3000, "at about 3,000 GPUs, by the formulas and costs as they are."),
    ],
)
def test_the_interval_of_a_break_even_is_said(
    least: int | None, most: int | None, said: str
) -> None:
    change = {"below": "drop-replica", "above": "hot-spare", "gpus": 3000, "low": 2048}
    one = BreakEven(**change, high=4096, least=least, most=most, by="formula")
    found = projected().model_copy(update={"break_even": [one]})
    assert any(line.endswith(said) for line in words.findings(found))


def test_the_chance_of_simulations_is_in_the_interval_of_a_break_even() -> None:
    """0.1 ahead at 1,024, 0.3 behind at 4,096, each 0.02 by chance at 95 %: it may be anywhere that
    the two are no more than that apart.
    """
    (found,) = overtaken(0.02 / 1.96 / 2**0.5, (1024, 4096), (0.9, 0.5))
    assert found.least == pytest.approx(1024 * 2 ** (2 * (0.1 - 0.02) / 0.4), abs=2)
    assert found.most == pytest.approx(1024 * 2 ** (2 * (0.1 + 0.02) / 0.4), abs=2)


def test_the_interval_of_a_break_even_ends_where_there_is_no_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.1, 0.03, -0.03 and -0.1 ahead, of which costs leave 0.05 open: on the lines beside them."""
    monkeypatch.setattr(breakeven, "_unknown", lambda *of: 0.05 / 2**0.5)
    (found,) = overtaken(0.0, (512, 1024, 2048, 4096), (0.9, 0.83, 0.77, 0.7))
    assert (found.low, found.gpus, found.high) == (1024, 1448, 2048)
    ends = (512 * 2 ** (5 / 7), 2048 * 2 ** (2 / 7))
    assert (found.least, found.most) == pytest.approx(ends, abs=1)
