"""``chaos stacks``: lists and installs the recovery stacks that can be compared."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FLAG, FORMAT, complete_stack, option
from trainchaos.chaos.commands.shared.say import say, say_json, say_table
from trainchaos.chaos.units import visible

if TYPE_CHECKING:
    from trainchaos.harness.compare.environments.environments import Environment

_NAMES = click.argument("names", nargs=-1, metavar="NAME...", shell_complete=complete_stack)


@click.group("stacks")
def stacks() -> None:
    """List, install and remove the recovery stacks that can be compared."""


@stacks.command("list")
@FORMAT
def list_(form: str) -> None:
    """List every stack, and whether it is ready to use."""
    from trainchaos.harness.compare.environments import environments

    rows = [(_facts(environments.look(name)), kind) for name, kind in environments.stacks().items()]
    if form == "json":
        say_json([facts | {"title": kind.title, "ours": kind.ours} for facts, kind in rows])
        return
    missing = [facts["name"] for facts, _ in rows if not facts["ready"]]
    cells = [
        (
            facts["name"],
            "ready  " if facts["ready"] else "missing",
            kind.title + ("" if facts["ready"] else f" ({facts['why']})"),
        )
        for facts, kind in rows
    ]
    say_table(cells)
    if missing:
        say(f"to install what is missing: chaos stacks install {' '.join(missing)}")


@stacks.command()
@_NAMES
@option("--all every", FLAG, "Install all that are not ready.")
def install(names: tuple[str, ...], every: bool) -> int:
    """Create the environments of these stacks from pinned requirements; ready ones are left
    unchanged.
    """
    from trainchaos.harness.compare.environments import environments

    if bool(names) == every:
        raise click.UsageError("name stacks, or use --all; chaos stacks list shows them")
    for name in names:
        environments.find(name)
    code = errors.EXIT_PASS
    for name in names or environments.stacks():
        before = environments.look(name)
        try:
            found = _installed(name)
        except errors.ChaosError as error:
            say(str(error), err=True)
            code = code or error.exit_code
            continue
        where = f"in {found.directory}" if found.directory else "with chaos itself"
        say(f"{name}: {'was ready' if before.ready else 'ready'} {where}")
    return code


@stacks.command()
@click.argument("name", shell_complete=complete_stack)
@FORMAT
def show(name: str, form: str) -> None:
    """Show a stack: its settings with their reasons, its versions, and the families it is left out
    of.
    """
    from trainchaos.harness.compare.environments import environments

    facts = _facts(environments.look(name)) | _about(name)
    if form == "json":
        say_json(facts)
    else:
        say(_as_text(facts))


@stacks.command()
@_NAMES
def remove(names: tuple[str, ...]) -> None:
    """Delete the environments of these stacks; a shared one is deleted for all stacks
    that use it.
    """
    from trainchaos.harness.compare.environments import environments, installing

    if not names:
        raise click.UsageError("name the stacks; chaos stacks list shows them")
    for name in names:
        environments.find(name)
    for name in names:
        where = installing.remove(name)
        say(f"{name}: removed {where}" if where else f"{name}: has no environment")


def _installed(name: str) -> Environment:
    from trainchaos.harness.compare.environments import installing

    try:
        return installing.install(name, _Progress())
    finally:
        _Progress.clear()


class _Progress:
    """Progress: one rewritten line on a terminal; elsewhere a new line for each new step."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, line: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[2K{visible(line[:108])}", err=True, nl=False)
        elif (what := line.partition(" (")[0]) != self._said:
            self._said = what
            say(what, err=True)

    @staticmethod
    def clear() -> None:
        """Erase the progress line."""
        if sys.stderr.isatty():
            click.echo("\r\x1b[2K", err=True, nl=False)


def _facts(found: Environment) -> dict[str, Any]:
    return {
        "name": found.name,
        "ready": found.ready,
        "why": found.why,
        "python": str(found.python),
        "directory": str(found.directory) if found.directory else None,
        "versions": dict(found.versions),
    }


def _about(name: str) -> dict[str, Any]:
    from trainchaos.chaos.planning.listing import first_sentence
    from trainchaos.harness.compare.environments import environments
    from trainchaos.harness.compare.environments.stack import FAMILIES

    kind = environments.find(name)
    settings = {each.settings: dict(each.chosen()) for each in (kind("default"), kind("tuned"))}
    tuned = kind("tuned")
    not_offered = {family: why for family in FAMILIES if (why := tuned.not_offered(family))}
    needs = kind.requirements
    return {
        "title": kind.title,
        "about": first_sentence(kind),
        "ours": kind.ours,
        "settings": settings,
        "tuned_because": kind.tuned_because,
        "not_offered": not_offered,
        "fidelity": list(tuned.fidelity()),
        "pins": environments.wanted(needs) if needs else [],
    }


def _as_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['name']}: {facts['title']}", f"  {facts['about']}", ""]
    state = (
        "ready"
        if facts["ready"]
        else f"missing: {facts['why']}; chaos stacks install {facts['name']}"
    )
    lines.append(f"  state     {state}")
    lines.append(f"  place     {facts['directory'] or 'chaos itself'}")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines.append(f"  versions  {versions or ', '.join(facts['pins'])}")
    for settings, chosen in facts["settings"].items():
        said = ", ".join(f"{name} = {value}" for name, value in chosen.items())
        lines.append(f"  {settings:8}  {said or 'nothing set'}")
    lines.append(f"  because   {facts['tuned_because']}")
    lines += [f"  not under {family}: {why}" for family, why in facts["not_offered"].items()]
    lines += [f"  note      {note}" for note in facts["fidelity"]]
    return "\n".join(lines)


COMMANDS = [stacks]
