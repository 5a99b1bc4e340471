"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

PATH: click.Path = click.Path(path_type=Path)
SCENARIO: click.Path = click.Path(path_type=Path, readable=False)  # loading says why it cannot read
RUNS = click.option(
    "--runs",
    type=PATH,
    default=Path("runs"),
    show_default=True,
    help="Directory of run directories.",
)
FORMAT = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Output format.",
)
