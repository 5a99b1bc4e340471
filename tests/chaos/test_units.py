"""Ranges as they are shown enclose all values."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos.stats import LEAST_OF_MEDIAN, median_ci95
from trainchaos.chaos.units import enclosing, interval, percents
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.samples import summarise
from trainchaos.harness.judge.results import Survival, beside
from trainchaos.harness.judge.verdict.gates import _observed
from trainchaos.reports.content.figures import metrics, range_of, survived


def row_of(metric: Metric) -> list[str]:
    """Of the table of all metrics."""
    cell = SimpleNamespace(id="c", label="", metrics={"x": metric}, absent={}, unjudged={})
    results: Any = SimpleNamespace(cells=[cell])
    return metrics(results).texts[1]


def ends(text: str) -> tuple[float, float]:
    """The ends of ``[low, high]``."""
    low, high = text[text.index("[") + 1 : text.index("]")].split(", ")
    return float(low.removesuffix(" %")), float(high.removesuffix(" %"))


@pytest.mark.parametrize("decimals", [None, 0, 4])
def test_a_range_encloses_its_values(decimals: int | None) -> None:
    drawn = random.Random(1)
    for _ in range(2000):
        size = 10 ** drawn.uniform(-5, 6)
        low, high = sorted(drawn.uniform(-size, size) for _ in range(2))
        shown = [float(end.replace(",", "")) for end in enclosing(low, high, decimals=decimals)]
        off = 1e-8 * size  # nine digits are read of a value
        assert shown[0] <= low + off and high - off <= shown[1], (low, high)


def test_ends_of_a_range_that_are_not_numbers() -> None:
    assert interval(None) == ""
    assert interval((0.0, math.inf)) == "[0, never]"
    assert interval((None, None), decimals=4) == "[–, –]"
    assert enclosing(-0.00001, 1234567.2, decimals=1) == ("-0.1", "1,234,567.2")
    assert enclosing(-0.5, -0.00001, decimals=1) == ("-0.5", "0.0")
    assert enclosing(3.0, 12.0, "steps") == ("3", "12")


VALUES = [0.83149, 0.83251, 0.9, 0.95, 0.96, 0.98449]


@pytest.mark.parametrize("name", ["recovery_time", "goodput"])
def test_every_interval_of_a_metric_encloses_its_values(name: str) -> None:
    """Whichever direction is better: a single value is rounded against us, a range outwards."""
    metric = summarise(name, VALUES)
    least, most = min(VALUES), max(VALUES)
    _, _, _, _, low, high, between, *_ = row_of(metric)
    observed = _observed(0.9, metric.unit, metric.better, VALUES, range(6))
    found = [range_of(metric), between, observed[observed.index("[") :], f"[{low}, {high}]"]
    for text in found:
        assert ends(text) == (0.831, 0.985), text
        assert ends(text)[0] <= least and most <= ends(text)[1]


def test_shares_and_steps_are_rounded_outwards() -> None:
    one = Survival(arms=4, survived=3, probability=0.75, low=0.19419, high=0.99361)
    assert survived(one) == "3 of 4: 75.0 % [19.4 %, 99.4 %]"
    assert survived(one.model_copy(update={"high": 0.99312})) == "3 of 4: 75.0 % [19.4 %, 99.4 %]"
    assert percents(0.93149, 0.95011) == "93.1 % to 95.1 %"
    assert percents(0.5, 0.5) == "50.0 %"
    assert beside(1.0, [0.02959, 0.03011], "lower") == " (1.00 s, steps of 0.0295 to 0.0302 s)"
    assert beside(1.0, [0.0295, 0.0295], "lower") == " (1.00 s, a step of 0.0295 s)"


def test_what_an_interval_and_a_quantile_need_is_said() -> None:
    metric: Metric = summarise("recovery_time", VALUES[1:])
    assert row_of(metric)[6:9] == [f"needs {n} repeats" for n in (6, 59, 299)]
    assert median_ci95(VALUES[1:]) is None and median_ci95(VALUES) is not None
    assert len(VALUES) == LEAST_OF_MEDIAN
