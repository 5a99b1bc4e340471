"""``chaos agent``: one node of a run."""

from __future__ import annotations

from typing import Any

import click

from trainchaos.chaos.commands.shared.options import PATH


@click.command()
@click.option(
    "--coordinator", required=True, metavar="HOST:PORT", help="Address of the run's harness."
)
@click.option(
    "--node", required=True, type=click.IntRange(min=0), help="Number of this node in the run."
)
@click.option(
    "--address",
    default="",
    help="Address at which other nodes reach this one; by default as the harness sees it.",
)
@click.option(
    "--token-file",
    required=True,
    type=PATH,
    help="File with the run's token, hexadecimal, mode 0600.",
)
@click.option(
    "--scratch",
    required=True,
    type=PATH,
    help="Directory for event logs and outputs until they are sent.",
)
@click.option(
    "--lease",
    "lease_s",
    default=120.0,
    show_default=True,
    help="Seconds the agent lives on without the harness.",
)
def agent(**options: Any) -> int:
    """Serve one node of a run. Launchers start it themselves; see docs/clusters.md."""
    from trainchaos.harness.launch.recipe import recipe
    from trainchaos.recovery.nodes.serve import serve

    return serve(recipe=recipe(), **options)


COMMANDS = [agent]
