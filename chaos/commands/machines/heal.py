"""``chaos heal`` and ``chaos ps``: what runs left behind, and which are alive."""

from __future__ import annotations

import json
from pathlib import Path

import click

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FORMAT, RUN, RUNS
from trainchaos.chaos.commands.shared.say import say


@click.command()
@click.argument("run", required=False, type=RUN)
@click.option(
    "--all", "every", is_flag=True, help="Heal every run below --runs; the default without a RUN."
)
@RUNS
@FORMAT
@click.option("-q", "--quiet", is_flag=True, help="Print less.")
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
        say(json.dumps([one.model_dump(mode="json") for one in healed], indent=2))
    elif not healed and not quiet:
        say("nothing to heal")
    for one in healed if form == "text" else ():
        if not quiet or one.state == "left":
            say("\n".join(one.lines))
    return healing.exit_code(healed)


@click.command()
@RUNS
@FORMAT
def ps(runs: Path, form: str) -> int:
    """List live runs, and what dead runs left behind."""
    from trainchaos.harness.run import ps as live
    from trainchaos.harness.run import ps_text

    found = live.listing(runs)
    rows = [one.model_dump(mode="json") for one in found]
    say(json.dumps(rows, indent=2) if form == "json" else ps_text.as_text(found, runs))
    return errors.EXIT_PASS


COMMANDS = [heal, ps]
