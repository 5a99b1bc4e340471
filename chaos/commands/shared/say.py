"""Prints text, tables and JSON without terminal control sequences, whatever the names in them
contain.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Sequence

import click

from trainchaos.chaos import columns


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, on standard error if ``err``. Unprintable characters (escapes, bidirectional
    controls) are shown as JSON escapes.
    """
    click.echo(plain(text), err=err, nl=nl)


def say_json(tree: object) -> None:
    """Print plain values as indented JSON."""
    say(json.dumps(tree, indent=2))


def say_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns, folded into the width of a terminal."""
    say("\n".join(columns.table(rows, width=columns.width_of(sys.stdout))))


def say_lines(lines: Iterable[str], hang: int, *, err: bool = False) -> None:
    """Print lines, each folded into the width of a terminal. ``hang``: spaces before what goes on
    from an indented line.
    """
    wide = columns.width_of(sys.stderr if err else sys.stdout)
    for line in lines:
        for part in columns.fold(line, wide, " " * hang if line.startswith("  ") else ""):
            say(part, err=err)


def tell(form: str, tree: object, lines: Iterable[str], hang: int = 0) -> None:
    """Print the plain values or the lines, by ``--format``."""
    if form == "json":
        say_json(tree)
    else:
        say_lines(lines, hang)


def plain(text: str) -> str:
    """The text with unprintable characters as ``\\u001b`` and the like."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or _is_space(one) else _number(one) for one in text)


def _is_space(one: str) -> bool:
    return one in "\n\t" or unicodedata.category(one) == "Zs"


def _number(one: str) -> str:
    code = ord(one)
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code - 0x10000 & 0x3FF):04x}"
