"""Metrics, rates and clauses of a run as text, rounded as in ``chaos.units``."""

from __future__ import annotations

from trainchaos.chaos.scenario.sla import Clause, ClauseError, parse_clause
from trainchaos.chaos.units import (
    MISSING,
    enclosing,
    interval,
    number,
    percent,
    quantity,
    with_unit,
)
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.results import (
    LEAST_RANK_HOURS,
    FalseAlarms,
    SlaResult,
    Survival,
)


def median_of(metric: Metric | None, *, unit: bool = False, alone: bool = True) -> str:
    """The median of a metric, rounded against us; ``unit``: with its unit. With ``alone`` (no
    column beside it shows the count), it says how many values it has if some are missing.
    """
    if metric is None or metric.median is None:
        return MISSING
    text = with_unit if unit else quantity
    shown = text(metric.median, metric.unit, metric.better)
    return shown + (few(metric) if alone else "")


def few(metric: Metric | None) -> str:
    """`` (2 of 3)`` if an incident or arm gave no value; else empty."""
    return "" if metric is None or metric.counted == str(metric.n) else f" ({metric.counted})"


def count_of(metric: Metric | None) -> str:
    """Number of values of a metric, for a separate column."""
    return MISSING if metric is None else metric.counted


def range_of(metric: Metric | None) -> str:
    """``[min, max]`` of a metric; empty with fewer than two values."""
    if metric is None or metric.n < 2:
        return ""
    return interval((metric.min, metric.max), metric.unit)


def survived(one: Survival | None) -> str:
    """``3 of 4: 75.0 % [19.4 %, 99.4 %]``; empty without data."""
    if one is None or one.probability is None:
        return ""
    between = "[{} %, {} %]".format(*enclosing(one.low * 100, one.high * 100))
    return f"{one.survived} of {one.arms}: {percent(one.probability)} {between}"


def alarms(one: FalseAlarms) -> tuple[str, str, str]:
    """Number of false alarms, rank-hours, and rate per rank-hour; with few hours only its upper
    bound.
    """
    if one.rate is None:
        return MISSING, MISSING, "no unfaulted time"
    rate = number(one.rate) if one.enough else f"too few hours ({LEAST_RANK_HOURS:g} needed)"
    bound = f"{rate}, below {number(one.upper, 'lower')} with 95 %"
    return str(one.count), number(one.rank_hours, "higher"), bound


def clause_of(sla: SlaResult) -> Clause | None:
    """The limit of a clause in the metric's unit; None for a form of which a report shows only the
    text.
    """
    try:
        return parse_clause(sla.clause, sla.unit)
    except ClauseError:
        return None
