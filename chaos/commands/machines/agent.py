"""``chaos agent``: one node of a run."""

from __future__ import annotations

from typing import Any

import click

from trainchaos.chaos.commands.shared.options import PATH, option


@click.command()
@option("--coordinator", None, "Address of the run's harness.", required=True, metavar="HOST:PORT")
@option("--node", click.IntRange(min=0), "Number of this node in the run.", required=True)
@option(
    "--address",
    None,
    "Address at which other nodes reach this one; by default as the harness sees it.",
    default="",
)
@option("--token-file", PATH, "File with the run's token, hexadecimal, mode 0600.", required=True)
@option(
    "--scratch", PATH, "Directory for event logs and outputs until they are sent.", required=True
)
@option("--lease lease_s", None, "Seconds the agent lives on without the harness.", 120.0)
def agent(**options: Any) -> int:
    """Serve one node of a run. Launchers start it themselves; see docs/clusters.md."""
    from trainchaos.harness.launch.recipe import recipe
    from trainchaos.recovery.nodes.serve import serve

    return serve(recipe=recipe(), **options)


COMMANDS = [agent]
