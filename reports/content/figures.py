"""Formats numbers and text for people, rounding as in ``chaos.events.figures``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import category

from trainchaos.chaos.events.figures import (
    MISSING,
    NEVER,
    counted,
    enclosing,
    interval,
    number,
    quantity,
    with_unit,
)
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.results import LEAST_RANK_HOURS, FalseAlarms, Survival

__all__ = [
    "MISSING",
    "NEVER",
    "ClauseFigure",
    "alarms",
    "align",
    "count_of",
    "counted",
    "enclosing",
    "few",
    "flatten",
    "interval",
    "median_of",
    "number",
    "pairs",
    "parse_clause",
    "percent",
    "percents",
    "plural",
    "quantity",
    "range_of",
    "scalar",
    "survived",
    "visible",
    "with_unit",
]
_CLAUSE = re.compile(r"^\s*(\S+)\s*(<=|>=|==|!=|<|>)\s*([-+0-9.eE_]+)\s*(\S*)\s*$")
_TO_BASE = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
    "%": 0.01,
}
UNSEEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Unicode categories of characters that are neither visible nor spaces."""
_FIGURE_SPACE = "\u2007"
_POINT_SPACE = "\u2008"


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


def percent(ratio: float) -> str:
    """A ratio as a percentage with at most three significant digits."""
    return f"{number(ratio * 100)} %"


def percents(low: float, high: float) -> str:
    """Ratios from ``low`` to ``high`` as percentages: ``93.1 % to 95 %``, or one that all are."""
    if percent(low) == percent(high):
        return percent(low)
    return "{} % to {} %".format(*enclosing(low * 100, high * 100))


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


def align(texts: Sequence[str]) -> list[str]:
    """Pad numbers on the right with figure spaces, so that the decimal points of a right-aligned
    column line up.
    """
    decimals = [len(t.partition(".")[2]) if _is_number(t) else None for t in texts]
    widest = max((d for d in decimals if d is not None), default=0)
    return [
        t if d is None else t + _padding(d, widest) for t, d in zip(texts, decimals, strict=True)
    ]


def _is_number(text: str) -> bool:
    return bool(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", text))


def _padding(decimals: int, widest: int) -> str:
    if widest == 0:
        return ""
    point = _POINT_SPACE if decimals == 0 else ""
    return point + _FIGURE_SPACE * (widest - decimals)


@dataclass(frozen=True, kw_only=True)
class ClauseFigure:
    """A parsed SLA clause; ``limit`` is in base units (seconds, ratio)."""

    aggregate: str
    op: str
    limit: float


def parse_clause(text: str) -> ClauseFigure | None:
    """Parse ``"median < 500ms"``. None for any other form, of which the report shows
    only the text.
    """
    match = _CLAUSE.match(text)
    if match is None:
        return None
    try:
        limit = float(match[3].replace("_", ""))
    except ValueError:
        return None
    return ClauseFigure(aggregate=match[1], op=match[2], limit=limit * _TO_BASE.get(match[4], 1.0))


def pairs(data: dict[str, Any]) -> str:
    """A small dictionary as ``key value · key value``."""
    return " · ".join(f"{key} {scalar(value)}" for key, value in data.items())


def scalar(value: Any) -> str:
    """Any JSON value as short text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} {scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return ", ".join(scalar(v) for v in value)
    return MISSING if value is None else str(value)


def flatten(data: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested dictionaries as dotted names with short texts."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", scalar(value)))
    return rows


def plural(count: int, noun: str) -> str:
    """``1 arm``, ``2 arms``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def visible(text: str) -> str:
    """Text with control characters, including bidirectional ones, spelt out; line feeds, tabs and
    spaces stay. Names come from YAML and logs, and their escape sequences must not reach a terminal
    or a page.
    """
    unseen = {
        ord(c): ascii(c)[1:-1] for c in set(text) if c not in "\n\t" and category(c) in UNSEEN
    }
    return text.translate(unseen) if unseen else text
