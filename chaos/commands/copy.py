"""``chaos copy``: a file of one's own of what comes with this program."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from trainchaos.chaos.commands.shared.options import FLAG, PATH, option
from trainchaos.chaos.commands.shared.say import say


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from trainchaos.chaos.loading import builtin

    names = (f"{builtin.PREFIX}{name}" for name in (*builtin.scenarios(), *builtin.others()))
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command()
@click.argument("name", shell_complete=_names)
@click.argument("directory", type=PATH, default=Path("."))
@option("--force", FLAG, "Replace files that are there.")
def copy(name: str, directory: Path, force: bool) -> None:
    """Copy builtin:NAME into DIRECTORY: a scenario with those it extends, an example
    (builtin:examples/NAME) or a template (builtin:templates/NAME).

    'chaos list scenarios' shows the names.
    """
    from trainchaos.chaos.loading import builtin

    for path in builtin.copy(name, directory, force=force):
        say(str(path))


COMMANDS = [copy]
