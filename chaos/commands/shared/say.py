"""Prints text, tables and JSON without control sequences, whatever the names in them contain."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

from trainchaos.chaos import columns
from trainchaos.chaos.units import visible


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, on standard error if ``err``."""
    click.echo(visible(text), err=err, nl=nl)


def say_json(tree: Any, *, err: bool = False) -> None:
    """Print plain values, or a model, as indented JSON, in ASCII."""
    plain = json.loads(tree.model_dump_json()) if hasattr(tree, "model_dump_json") else tree
    say(json.dumps(plain, indent=2), err=err)


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
