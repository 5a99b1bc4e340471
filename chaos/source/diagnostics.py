"""Locates and formats problems of a scenario: ``file:line:column: message``, source line, caret."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.plugins import DIRECTORY, FAULTS, LAUNCHERS, STRATEGIES, WORKLOADS, left_out
from trainchaos.chaos.scenario.sla import nearest

Loc = tuple[str | int, ...]

# Words familiar from other tools that no edit distance would match.
_PLUGINS = {
    "fault kind": FAULTS,
    "strategy": STRATEGIES,
    "workload": WORKLOADS,
    "launcher": LAUNCHERS,
}
_FAMILIAR = {
    "on": "at",
    "when": "at",
    "type": "kind",
    "fault": "kind",
    "name": "id",
    "slas": "sla",
    "slo": "sla",
}
_MAX_LISTED = 12
_MAX_SHOWN = 50  # errors
_MAX_LINE, _MAX_BEFORE = 160, 60  # characters of a source line, and of those before its caret
_MAX_MESSAGE = 400
_MAX_SOURCE = 500
_LONG_WORD = re.compile(r"\S{121,}")
_MAX_WORD = 80  # in a message; the source line below repeats the word


@dataclass(frozen=True, kw_only=True)
class Span:
    """A word in a source. ``line`` and ``column`` count from 1, in characters; ``text`` is the
    whole line.
    """

    source: str
    line: int
    column: int
    width: int
    text: str

    def narrowed(self, word: str) -> Span:
        """The span of ``word`` in this line, at or after this column; this span if it is
        not there.
        """
        start = self.text.find(word, self.column - 1) if word else -1
        return self if start < 0 else dataclasses.replace(self, column=start + 1, width=len(word))


@dataclass(frozen=True)
class Problem:
    """Something wrong at a place in the tree.

    ``on_key``: the key is wrong, not its value; ``word``: part of the value.
    """

    loc: Loc
    message: str
    on_key: bool = dataclasses.field(default=False, kw_only=True)
    word: str = dataclasses.field(default="", kw_only=True)


@dataclass(frozen=True)
class LocatedProblem:
    """A problem with its place in a file."""

    span: Span
    message: str


def unknown(what: str, word: str, choices: Iterable[str]) -> str:
    """``unknown <what> 'word'`` with the nearest valid word, else the valid words; of a plugin from
    outside that was left out, why it was.
    """
    package = _PLUGINS.get(what)
    for row in left_out(package, word) if package else ():
        return f"{what} {word!r} of {row.place} cannot be used: {row.why}"
    missing = "".join(f" ({row})" for row in left_out(DIRECTORY)) if package else ""
    ordered = sorted(choices)
    familiar = _FAMILIAR.get(word, "")
    near = nearest(word, ordered) or (familiar if familiar in ordered else "")
    if near:
        return f"unknown {what} {word!r}; did you mean {near!r}?{missing}"
    if not ordered:
        return f"unknown {what} {word!r}; there are none{missing}"
    listed = ", ".join(ordered[:_MAX_LISTED]) + (", ..." if len(ordered) > _MAX_LISTED else "")
    return f"unknown {what} {word!r}; use one of: {listed}{missing}"


def render(placed: LocatedProblem, *, label: str = "") -> str:
    """One problem as text of three lines (one if its source line is empty)."""
    span = _shortened(placed.span)
    message = _LONG_WORD.sub(lambda word: clipped(word[0], _MAX_WORD), placed.message)
    message = _on_one_line(clipped(message, _MAX_MESSAGE))
    source = _on_one_line(clipped(span.source, _MAX_SOURCE))
    head = f"{source}:{span.line}:{placed.span.column}: {label}{message}"
    if not span.text.strip():
        return head
    # Tabs stay tabs, so that the caret stands under its word at any tab width. Nothing unprintable
    # reaches a terminal.
    text = "\t".join(_on_one_line(part) for part in span.text.split("\t"))
    lead = "".join("\t" if char == "\t" else " " for char in span.text[: span.column - 1])
    return f"{head}\n  {text}\n  {lead}{'^' * max(1, span.width)}"


def clipped(text: str, most: int) -> str:
    """Its beginning and end, where it is longer than ``most`` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def _on_one_line(text: str) -> str:
    """Replaces unprintable characters with ``?``, line breaks too, so that a file cannot imitate
    our lines.
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def _shortened(span: Span) -> Span:
    """The span with its line shortened to a readable length."""
    text, column = span.text, span.column
    if len(text) > _MAX_LINE:
        start = max(0, column - 1 - _MAX_BEFORE)
        before = "... " if start else ""
        text, column = before + text[start : start + _MAX_LINE], column - start + len(before)
    width = max(1, min(span.width, len(text) - column + 1))
    return dataclasses.replace(span, text=text, column=column, width=width)


def in_order(placed: Iterable[LocatedProblem]) -> list[LocatedProblem]:
    """Without duplicates, by place."""
    unique = dict.fromkeys(placed)
    return sorted(unique, key=lambda p: (p.span.source, p.span.line, p.span.column))


def scenario_error(placed: Sequence[LocatedProblem]) -> ScenarioError:
    """All problems in one error."""
    ordered = in_order(placed)
    text = "\n".join(render(each) for each in ordered[:_MAX_SHOWN])
    if len(ordered) > _MAX_SHOWN:
        text += f"\n... and {len(ordered) - _MAX_SHOWN} more"
    count = f"{len(ordered)} errors" if len(ordered) > 1 else "1 error"
    return ScenarioError(f"{text}\n{count}; nothing was started")
