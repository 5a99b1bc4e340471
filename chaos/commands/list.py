"""``chaos list``: lists what a scenario may name."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from trainchaos.chaos.commands.shared.options import FLAG, FORMAT, option
from trainchaos.chaos.commands.shared.say import say, say_json

if TYPE_CHECKING:
    from trainchaos.chaos.planning.listing import ListingEntry

KINDS = ("faults", "strategies", "workloads", "launchers", "checkers", "metrics", "scenarios")
ALSO = {"recovery": "strategies"}  # a strategy's key in scenarios


@click.command("list")
@click.argument("kind", required=False, type=click.Choice([*KINDS, *ALSO]))
@option("-v --verbose", FLAG, "Also show whole descriptions, and parameters with their defaults.")
@FORMAT
def list_(kind: str | None, verbose: bool, form: str) -> None:
    """List what a scenario may name: faults, strategies, workloads, launchers, checkers,
    metrics.
    """
    from trainchaos.chaos import columns, plugins
    from trainchaos.chaos.planning import listing

    found = {name: entries(name) for name in ((ALSO.get(kind, kind),) if kind else KINDS)}
    if form == "json":
        say_json({kind: [asdict(entry) for entry in entries] for kind, entries in found.items()})
    else:
        say(listing.as_text(found, verbose=verbose, width=columns.width_of(sys.stdout)))
    for one in plugins.left_out():
        say(str(one), err=True)


def entries(kind: str) -> list[ListingEntry]:
    """What there is of one of ``KINDS``."""
    from trainchaos.chaos.planning import listing

    if kind == "scenarios":
        return listing.scenario_entries(Path("scenarios"))
    if kind == "metrics":
        from trainchaos.harness.judge.measure.measure import METRICS

        return [
            listing.ListingEntry(name=name, summary=f"{metric.doc} [{metric.unit}]")
            for name, metric in METRICS.items()
        ]
    if kind == "checkers":
        from trainchaos.harness.judge.checkers import BY_NAME, CHECKERS, OF_COMMANDS

        return [
            listing.ListingEntry(
                name=name,
                summary=listing.first_sentence(checker),
                about=listing.whole_docstring(checker),
            )
            for name, checker in (*CHECKERS.items(), *OF_COMMANDS.items(), *BY_NAME.items())
        ]
    return _plugins(kind)


def _plugins(kind: str) -> list[ListingEntry]:
    from trainchaos.chaos.commands.shared.options import build_catalogue
    from trainchaos.chaos.planning import listing

    catalogue = build_catalogue()
    if kind == "faults":
        launchers = cast("dict[str, type[Any]]", catalogue.launchers)
        return [
            listing.fault_entry(name, cast("Any", model), launchers)
            for name, model in catalogue.faults.items()
        ]
    models = cast("dict[str, type[Any]]", getattr(catalogue, kind))
    return [listing.model_entry(name, model) for name, model in models.items()]


COMMANDS = [list_]
