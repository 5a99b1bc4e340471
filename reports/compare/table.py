"""One table of a comparison; each cell carries its sort key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup, escape

from trainchaos.harness.compare.result.model import OutcomeClass
from trainchaos.harness.judge.figures import Metric
from trainchaos.reports.compare.facts import OUTCOMES
from trainchaos.reports.compare.shapes import icon
from trainchaos.reports.compare.words import exact, figure, median
from trainchaos.reports.content.figures import MISSING, align, few

MAX_ROWS = 2000


FINEST_S = 1e-4


OUTCOME_ORDER = {name: place for place, name in enumerate(OUTCOMES)}


@dataclass(frozen=True, kw_only=True)
class TableCell:
    """Content and its sort key: a number, text, or empty (sorted last)."""

    content: Markup
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Column:
    """Head of a column. ``kind``: text, number, wide (text that may wrap) or score (a block of
    several lines).
    """

    name: str
    unit: str = ""
    kind: str = "text"


@dataclass(frozen=True, kw_only=True)
class Table:
    """``name``: accessible name; ``left_out``: number of rows cut to keep the page readable."""

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    notes: tuple[str, ...] = ()
    left_out: int = 0


def table(
    name: str, columns: Sequence[Column], rows: Sequence[Sequence[TableCell]], *notes: str
) -> Table:
    """A table of at most MAX_ROWS rows, with the decimal points of a column aligned."""
    kept = [list(row) for row in rows[:MAX_ROWS]]
    for place, column in enumerate(columns):
        if column.kind == "number":
            texts = [row[place].content.striptags() for row in kept]
            for row, plain, padded in zip(kept, texts, align(texts), strict=True):
                row[place] = replace(row[place], content=row[place].content + padded[len(plain) :])
    return Table(
        name=name,
        columns=tuple(columns),
        rows=tuple(map(tuple, kept)),
        notes=notes,
        left_out=len(rows) - len(kept),
    )


def text(value: object, key: str | None = None) -> TableCell:
    """A text cell."""
    content = escape(value)
    return TableCell(content=content, key=str(value) if key is None else key)


def count(
    value: float | None, unit: str = "", better: str = "neither", finest: float = 0.0
) -> TableCell:
    """A cell with one number."""
    return TableCell(content=figure(value, unit, better, finest), key=sort_key(value))


def sort_key(value: float | None) -> str:
    """Sort key of a number; a missing one comes last."""
    return "" if value is None or math.isnan(value) else repr(float(value))


def outcome(name: OutcomeClass, note: str = "") -> Markup:
    """Shape and word of an outcome."""
    tone = "kept" if OUTCOMES[name].kept else "lost" if OUTCOMES[name].tried else "none"
    return Markup('<span class="outcome {}">{}<span>{}{}</span></span>').format(
        tone,
        icon(name),
        name,
        Markup(' <small class="quiet">{}</small>').format(note) if note else "",
    )


def middle(metric: Metric | None, finest: float = 0.0) -> TableCell:
    """A cell with the median of a metric."""
    if metric is None:
        return TableCell(content=Markup(MISSING))
    if finest:
        shown = count(metric.median, "", metric.better, finest)
        return replace(shown, content=shown.content + few(metric))
    if metric.median == math.inf and metric.unit != "s":
        return TableCell(content=exact(metric.median, "all"), key=sort_key(metric.median))
    return TableCell(content=median(metric), key=sort_key(metric.median))
