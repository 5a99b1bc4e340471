"""SLA clauses, durations, stop conditions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainchaos.chaos.scenario.sla import (
    AGGREGATES,
    Clause,
    evaluate,
    parse_clause,
    parse_duration,
    parse_stop,
    samples_needed,
)


@pytest.mark.parametrize(
    ("text", "unit", "limit"),
    [
        ("median < 2s", "s", 2.0),
        ("median<500ms", "s", 0.5),
        ("max <= 1m", "s", 60.0),
        ("max < 500ms", "ms", 500.0),
        ("max < 2s", "ms", 2000.0),
        ("median >= 0.80", "ratio", 0.8),
        ("median >= 80%", "ratio", 0.8),
        ("max <= 25", "steps", 25.0),
        ("max <= 25 steps", "steps", 25.0),
        ("max <= 1 step", "steps", 1.0),
        ("max == 0", "samples", 0.0),
        ("min > 1e3 samples/s", "samples/s", 1000.0),
        ("max < 3", "count", 3.0),
    ],
)
def test_limit_is_in_the_metrics_unit(text: str, unit: str, limit: float) -> None:
    clause = parse_clause(text, unit)
    assert clause.limit == pytest.approx(limit)
    assert (clause.unit, clause.text) == (unit, text)


@pytest.mark.parametrize(
    ("text", "limit"), [("median < 40 steps", 40.0), ("max<=1step", 1.0), ("p90 < 2.5 steps", 2.5)]
)
def test_a_time_may_be_bounded_in_steps(text: str, limit: float) -> None:
    clause = parse_clause(text, "s")
    assert (clause.limit, clause.unit, clause.in_steps) == (limit, "steps", True)
    assert not parse_clause("max <= 25 steps", "steps").in_steps  # counts steps itself
    assert not parse_clause("max < 2s", "s").in_steps


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        ("mdian < 2s", "s", "unknown aggregate 'mdian'; did you mean 'median'?"),
        (
            "xyz < 2s",
            "s",
            "unknown aggregate 'xyz'; use one of min, median, mean, max, all, p90, p95, p99",
        ),
        ("max =< 2s", "s", "unknown comparison '=<'; did you mean"),
        ("max < 2", "s", "2 has no unit: use one of us, ms, s, m, min, h, such as 2s or 2 steps"),
        ("max < 2 stps", "s", "'stps' is not a unit of time: use one of us, ms"),
        (
            "max < 2 steps",
            "ratio",
            "only a time can be bounded in steps, and this metric is a ratio: write",
        ),
        ("max < 2 step", "samples", "this metric is in samples: write 2"),
        ("max < 2kg", "s", "'kg' is not a unit of time"),
        ("max < 2s", "ratio", "unit 's' does not fit a ratio: write 0.80 or 80%"),
        ("max < 25s", "steps", "unit 's' does not fit a metric in steps: write 25"),
        ("max < fast", "s", "cannot read 'max < fast'"),
        ("", "s", "cannot read ''"),
        ("max < 1e999s", "s", "1e999 is too large"),
    ],
)
def test_bad_clause_says_what_would_be_right(text: str, unit: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_clause(text, unit)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "values", "holds", "observed"),
    [
        ("max < 2s", [1.0, 2.0], False, 2.0),
        ("max <= 2s", [1.0, 2.0], True, 2.0),
        ("min > 1s", [1.0, 2.0], False, 1.0),
        ("median < 2s", [1.0, math.inf, 1.5], True, 1.5),
        ("mean < 2s", [1.0, math.inf], False, math.inf),
        ("all < 2s", [1.0, 3.0], False, 3.0),
        ("all > 2s", [1.0, 3.0], False, 1.0),
        ("all == 2s", [2.0, 2.0, 1.0], False, 1.0),
        ("p90 < 10s", [float(n) for n in range(1, 31)], False, 27.0),
    ],
)
def test_evaluate(text: str, values: list[float], holds: bool, observed: float) -> None:
    assert evaluate(parse_clause(text, "s"), values) == (holds, observed)


def test_evaluate_needs_values() -> None:
    with pytest.raises(ValueError, match="no values to judge 'max < 2s' by"):
        evaluate(parse_clause("max < 2s", "s"), [])


def test_samples_needed_is_the_smallest_n_of_the_bound() -> None:
    assert [samples_needed(name) for name in ("median", "max", "p90", "p95", "p99")] == [
        1,
        1,
        29,
        59,
        299,
    ]
    for quantile, n in ((0.90, 29), (0.95, 59), (0.99, 299)):
        assert 1 - quantile**n >= 0.95 > 1 - quantile ** (n - 1)


@given(st.sampled_from(AGGREGATES), st.lists(st.floats(0, 1e6), min_size=1))
def test_every_aggregate_lies_within_the_values(aggregate: str, values: list[float]) -> None:
    _, observed = evaluate(Clause(aggregate=aggregate, op="<", limit=1, unit="s", text=""), values)
    assert min(values) * (1 - 1e-9) <= observed <= max(values) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("value", "seconds"), [("2s", 2), ("500ms", 0.5), ("1m", 60), ("1.5 h", 5400), (2.0, 2), (3, 3)]
)
def test_duration(value: str | float, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value", ["2", "s", "2x", "-2s", -1, math.nan, math.inf, True, None, "1e999s"]
)
def test_no_duration(value: object) -> None:
    with pytest.raises(ValueError):
        parse_duration(value)  # type: ignore[arg-type]


def test_stop_conditions() -> None:
    rule = parse_stop("no_committed_step_for > 60s")
    assert (rule.name, rule.limit_s) == ("no_committed_step_for", 60)
    assert parse_stop("wall_time>5m").limit_s == 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_commited_step_for > 60s", "did you mean 'no_committed_step_for'?"),
        ("wall_time < 60s", "wall_time uses '>', not '<'"),
        ("wall_time > 0s", "a stop condition needs a limit above zero"),
        ("wall_time > soon", "'soon' is not a duration"),
        ("failures > 2s", "'2s' is not a whole number"),
        ("healthy_replicas > 2", "healthy_replicas uses '<', not '>'"),
        ("healthy_replicas < 0", "needs a limit above zero"),
        ("loss_nonfinite > 2", "loss_nonfinite stands alone"),
        ("loss_nonfinit", "did you mean 'loss_nonfinite'?"),
        ("?", "cannot read '?'"),
        ("wall_time", "wall_time needs a limit: 'wall_time > 300s'"),
    ],
)
def test_bad_stop_condition(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_stop(text)
    assert message in str(raised.value)
