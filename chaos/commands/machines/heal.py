"""``chaos heal`` and ``chaos ps``: what runs left behind, and which are alive."""

from __future__ import annotations

from pathlib import Path

import click

from trainchaos.chaos.commands.shared.options import FLAG, FORMAT, QUIET, RUN, RUNS, option
from trainchaos.chaos.commands.shared.say import say, say_json


@click.command()
@click.argument("run", required=False, type=RUN)
@option("--all every", FLAG, "Heal every run below --runs; the default without a RUN.")
@RUNS
@FORMAT
@QUIET
def heal(run: Path | None, every: bool, runs: Path, form: str, quiet: bool) -> int:
    """Clean up what killed runs left behind.

    Removes their processes, containers, mounts, limits, shared memory and files. Skips runs whose
    harness is alive. Exit code 5: something could not be undone.
    """
    from trainchaos.harness.run import heal as healing

    if run is not None and every:
        raise click.UsageError("name a RUN or say --all, not both")
    healed = healing.heal_everything(runs) if run is None else healing.heal_named(run)
    if form == "json":
        say_json([one.model_dump(mode="json") for one in healed])
    elif not healed and not quiet:
        say("nothing to heal")
    for one in healed if form == "text" else ():
        if not quiet or one.state == "left":
            say("\n".join(one.lines))
    return healing.exit_code(healed)


@click.command()
@RUNS
@FORMAT
def ps(runs: Path, form: str) -> None:
    """List live runs, and what dead runs left behind."""
    from trainchaos.harness.run import ps
    from trainchaos.harness.run import ps as live

    found = live.listing(runs)
    if form == "json":
        say_json([one.model_dump(mode="json") for one in found])
    else:
        say(ps.as_text(found, runs))


COMMANDS = [heal, ps]
