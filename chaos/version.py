"""Tells which version and commit of this program runs."""

from __future__ import annotations

import importlib.metadata
import json

import click

from trainchaos.chaos.commit import built_from, commit_of
from trainchaos.chaos.home import HOME

DISTRIBUTION = "trainchaos"


def installed_commit() -> str:
    """The commit that pip installed from, if it installed from a repository (PEP 610)."""
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}"
        return str(json.loads(text).get("vcs_info", {}).get("commit_id", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError, AttributeError):
        return ""


def version_text() -> str:
    """``chaos 0.1.0 (commit 1a2b3c4d5e6f)``; ``+``: tracked files differ from the commit."""
    try:
        number = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        number = "of a folder that is not installed"
    commit = commit_of(HOME) or built_from() or installed_commit()
    short = commit[:12] + ("+" if commit.endswith("+") else "")
    return f"chaos {number}" + (f" (commit {short})" if commit else "")


def _show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(version_text())
        context.exit()


version_option = click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show,
    help="Show the version and the commit, and exit.",
)
"""``--version`` of the command line."""
