"""A table of any report: columns with units in the head, cells that are text, markup and a sort
key; and its form in Markdown. The macro ``show`` of the templates is its form on a page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape

from trainchaos.chaos.units import visible
from trainchaos.harness.judge.measure.catalogue import METRICS

VERDICT_MARKS = {"pass": "✓", "fail": "✗", "inconclusive": "?"}
MAX_ROWS = 2000
MAX_MARKDOWN_ROWS = 200
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&@$])")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_FIGURE_SPACE, _POINT_SPACE = "\u2007", "\u2008"


@dataclass(frozen=True, kw_only=True)
class Column:
    """Head of a column. ``kind``: text, number, wide (text that may wrap) or score (a block of
    several lines); ``about``: what its figures are, shown when pointed at.
    """

    name: str
    unit: str = ""
    kind: str = "text"
    about: str = ""

    @property
    def head(self) -> str:
        """Name and unit in one line."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``content``: for a page; ``text``: for Markdown; ``key``: a number or text by which a page
    sorts, empty: last.
    """

    content: Markup
    text: str
    key: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """``name``: accessible name; ``left_out``: number of rows cut to keep the page readable."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    name: str = ""
    notes: tuple[str, ...] = ()
    left_out: int = 0

    @property
    def texts(self) -> list[list[str]]:
        """Heads and rows as text."""
        head = [column.head for column in self.columns]
        return [head, *([one.text for one in row] for row in self.rows)]


def table(
    columns: Sequence[object],
    rows: Sequence[Sequence[object]],
    notes: Sequence[str] = (),
    name: str = "",
) -> Table:
    """A table of at most ``MAX_ROWS`` rows: numbers of a column are aligned at the decimal point.
    What is no ``Column`` is the name of one of text, what is no ``Cell`` is shown as it is.
    """
    heads = [one if isinstance(one, Column) else Column(name=str(one)) for one in columns]
    kept = [[_cell(one) for one in row] for row in rows[:MAX_ROWS]]
    for place, column in enumerate(heads):
        if column.kind == "number":
            texts = [row[place].text for row in kept]
            for row, plain, padded in zip(kept, texts, align(texts), strict=True):
                row[place] = replace(row[place], content=row[place].content + padded[len(plain) :])
    return Table(
        columns=tuple(heads),
        rows=tuple(map(tuple, kept)),
        name=name,
        notes=tuple(notes),
        left_out=len(rows) - len(kept),
    )


def _cell(value: object) -> Cell:
    if isinstance(value, Cell):
        return value
    text = value if isinstance(value, str) else str(value)
    return stacked(text, key=text.striptags() if isinstance(text, Markup) else text)


def stacked(*lines: str, key: str | float | None = "") -> Cell:
    """A cell of several lines, without those that are empty; all but the first are quiet. ``key``:
    a number, None: it has none.
    """
    given = [line for line in lines if line]
    first, *others = given or [""]
    content = escape(first)
    for line in others:
        block = isinstance(line, Markup) and line.startswith("<span")
        content += line if block else Markup('<span class="quiet under">{}</span>').format(line)
    texts = (line.striptags() if isinstance(line, Markup) else line for line in given)
    return Cell(
        content=content, text="; ".join(texts), key=key if isinstance(key, str) else sort_key(key)
    )


def sort_key(value: float | None) -> str:
    """Of a number; a missing one comes last."""
    return "" if value is None or math.isnan(value) else repr(float(value))


def numeric(name: str, unit: str = "", about: str = "") -> Column:
    """The head of a column of numbers."""
    return Column(name=name, unit=unit, kind="number", about=about)


def wide(name: str) -> Column:
    """The head of a column of text that may wrap."""
    return Column(name=name, kind="wide")


def measured(name: str, metric: str, unit: str = "") -> Column:
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


def align(texts: Sequence[str]) -> list[str]:
    """Pad numbers on the right with figure spaces, so that the decimal points of a right-aligned
    column line up.
    """
    decimals = [len(t.partition(".")[2]) if _NUMBER.fullmatch(t) else None for t in texts]
    widest = max((d for d in decimals if d is not None), default=0)
    return [
        t
        if d is None or not widest
        else t + (_POINT_SPACE if d == 0 else "") + _FIGURE_SPACE * (widest - d)
        for t, d in zip(texts, decimals, strict=True)
    ]


def plain(text: str) -> str:
    """Text that is no markup in Markdown: no HTML, no mention, one line."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _SPECIAL.sub(r"\\\1", flat)


def section(title: str) -> tuple[str, str, str]:
    """A heading with empty lines around it."""
    return "", f"### {title}", ""


def bullets(lines: Sequence[str]) -> Iterator[str]:
    """A list."""
    yield from (f"- {plain(line)}" for line in lines)


def as_markdown(
    of: Table, *, most: int = MAX_MARKDOWN_ROWS, rest: str = "results.json"
) -> Iterator[str]:
    """The same table in Markdown, of at most ``most`` rows; ``rest``: the file that has all."""
    head, *body = of.texts
    yield "| " + " | ".join(map(plain, head)) + " |"
    sides = ("---:" if column.kind == "number" else "---" for column in of.columns)
    yield "|" + "|".join(sides) + "|"
    for row in body[:most]:
        yield "| " + " | ".join(map(plain, row)) + " |"
    left = len(body) - most + of.left_out
    for note in (*of.notes, *([f"{left} more in {rest}."] if left > 0 else [])):
        yield from ("", plain(note))  # or the note would be a row of the table


def titled(title: str, shown: Table | None, **how: Any) -> Iterator[str]:
    """A section with a table; nothing without a row."""
    if shown is not None and shown.rows:
        yield from section(title)
        yield from as_markdown(shown, **how)


def code_lines(text: str) -> list[str]:
    """Lines for a fenced block, without fences that would end it early."""
    return [visible(line).replace("```", "'''") for line in text.splitlines()]
