"""``--plugins DIR`` of every command, and ``chaos.yaml``: where plugins from outside are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import PATH
from trainchaos.chaos.plugins import DIRECTORIES, OPTION, SORTS, forget, leave_out_directory

SETTINGS = Path("chaos.yaml")
"""File of the current directory with settings of a project: ``plugins``, a list of directories
relative to it. A scenario of that name is none.
"""
_KEY = "plugins"


def _use(ctx: click.Context, param: click.Parameter, given: tuple[Path, ...]) -> None:
    """Name the directories in the environment, where this process and those of a run find them."""
    try:
        told = [_checked(place) for place in given]
        settled = _of_settings(SETTINGS)
    except errors.ScenarioError:
        if ctx.resilient_parsing:  # a shell completes
            return
        raise
    missing = {}
    for place in settled:
        try:
            told.append(_checked(place))
        except errors.ScenarioError as error:  # of no concern to what does not need it
            missing[place] = error.message.removeprefix("plugins: ")
    if told:
        before = [place for place in os.environ.get(DIRECTORIES, "").split(os.pathsep) if place]
        os.environ[DIRECTORIES] = os.pathsep.join(dict.fromkeys([*told, *before]))
        forget()
    for place, why in missing.items():
        leave_out_directory(place, f"{SETTINGS}: {why}")


def _checked(place: Path) -> str:
    if not place.is_dir():
        raise errors.ScenarioError(f"plugins: {place} is not a directory")
    if not any((place / sort).is_dir() for sort in SORTS.values()):
        raise errors.ScenarioError(
            f"plugins: {place} has none of the folders {', '.join(SORTS.values())}"
        )
    return str(place.absolute())


def _of_settings(path: Path) -> Sequence[Path]:
    """The directories that the file names. Raises ScenarioError for anything else in it."""
    if not path.is_file():
        return ()
    from trainchaos.chaos.source.source import read_document

    tree = read_document(path).tree
    if "workload" in tree or "extends" in tree:
        return ()
    unknown = [key for key in tree if key != _KEY]
    if unknown:
        raise errors.ScenarioError(f"{path}: unknown key {unknown[0]!r}; it may have: {_KEY}")
    places = tree.get(_KEY) or []
    if not isinstance(places, list) or not all(isinstance(one, str) and one for one in places):
        raise errors.ScenarioError(f"{path}: {_KEY} needs a list of directories")
    return [path.parent / place for place in places]


def with_plugins(command: click.Command) -> None:
    """Give the command, and all below it, the option ``--plugins``."""
    if isinstance(command, click.Group):
        for one in command.commands.values():
            with_plugins(one)
    else:
        command.params.append(
            click.Option(
                [OPTION],
                type=PATH,
                multiple=True,
                metavar="DIR",
                expose_value=False,
                is_eager=True,
                callback=_use,
                help="Directory of plugins from outside (docs/plugins.md); repeatable.",
            )
        )
