"""One table of the report: columns with units in the head, cells formatted and aligned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from trainchaos.harness.judge.measure.catalogue import METRICS
from trainchaos.reports.content.facts import (
    VERDICT_MARKS,
)
from trainchaos.reports.content.figures import (
    align,
)

MAX_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class PageColumn:
    """Head of a column; ``kind`` is text, number or wide (text that may wrap). ``about``: what its
    figures are, shown when pointed at.
    """

    name: str
    unit: str = ""
    kind: str = "text"
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """Columns and rows of ready cells; ``left_out`` rows were cut to keep the page readable."""

    columns: tuple[PageColumn, ...]
    rows: tuple[tuple[Markup, ...], ...]
    notes: tuple[str, ...] = ()
    left_out: int = 0


def table(
    columns: Sequence[PageColumn], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> PageTable:
    """Build a table: numbers of a column are aligned at the decimal point, plain strings are
    escaped.
    """
    kept = [list(row) for row in rows[:MAX_ROWS]]
    for i, column in enumerate(columns):
        if column.kind == "number":
            for row, text in zip(kept, align([row[i] for row in kept]), strict=True):
                row[i] = text if not isinstance(row[i], Markup) else row[i]
    cells = tuple(tuple(escape(cell) for cell in row) for row in kept)
    return PageTable(
        columns=tuple(columns), rows=cells, notes=tuple(notes), left_out=len(rows) - len(kept)
    )


def numeric(name: str, unit: str = "", about: str = "") -> PageColumn:
    """The head of a column of numbers."""
    return PageColumn(name=name, unit=unit, kind="number", about=about)


def measured(name: str, metric: str, unit: str = "") -> PageColumn:
    """The head of a column with values of a metric, which is defined there."""
    return numeric(name, unit, definition(metric))


def definition(metric: str) -> str:
    """What a metric is, and in which unit; empty for a name that is none."""
    known = METRICS.get(metric)
    return "" if known is None else f"{metric}: {known.doc} [{known.unit}]"


def defined(metric: str) -> Markup:
    """The name of a metric, with its definition."""
    about = definition(metric)
    return Markup('<abbr title="{}">{}</abbr>').format(about, metric) if about else escape(metric)


def mark(verdict: str, label: str | None = None) -> Markup:
    """A verdict that reads without colour: sign and word."""
    sign = VERDICT_MARKS.get(verdict, "?")
    return Markup('<span class="v {}">{} {}</span>').format(
        verdict, sign, verdict if label is None else label
    )


def two_lines(first: str, second: str) -> Markup:
    """A cell of two lines, the second one quiet."""
    return Markup('{}<span class="quiet under">{}</span>').format(first, second)
