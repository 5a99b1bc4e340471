"""The house only becomes smaller: no package grows, and no public name comes unseen.

``python -m tests.project.sizes`` prints the table, ``--write`` lowers ceilings to what has fallen;
``python -m tests.project.test_sizes`` writes the names down anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tests.project.sizes import BUDGETS, ceilings, sizes
from trainchaos.chaos.cli import build_catalogue, cli
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.scenario.schema import scenario_schema

NAMES = Path(__file__).with_name("names.json")
LOOSE = 200  # lines that a ceiling may be above what it bounds


def test_no_package_grows() -> None:
    now, most = sizes(), ceilings()
    grown = {row: f"{now[row]} > {most[row]}" for row in BUDGETS if now[row] > most[row]}
    assert grown == {}, "what can go in return? (python -m tests.project.sizes)"


def test_ceilings_follow_what_has_fallen() -> None:
    now = sizes()
    loose = {row: most - now[row] for row, most in ceilings().items() if most - now[row] > LOOSE}
    assert loose == {}, "python -m tests.project.sizes --write"


def test_no_public_name_comes_unseen() -> None:
    frozen, now = json.loads(NAMES.read_text()), public_names()
    for what, names in now.items():
        new = set(names) - set(frozen[what])
        assert not new, f"{what}: {sorted(new)}: what do they replace?"
        gone = set(frozen[what]) - set(names)
        assert not gone, f"{what}: {sorted(gone)}: say so in CHANGELOG.md, and write names.json"


def public_names() -> dict[str, list[str]]:
    """What users write or read by name: promises that are kept, and few."""
    catalogue = build_catalogue()
    schema = scenario_schema(catalogue)
    return {
        "options": sorted(_options(cli)),
        "YAML keys": sorted(_keys(schema)),
        "event kinds": sorted(kind.value for kind in Kind),
        "metrics": sorted(catalogue.metrics),
        "invariants": sorted(catalogue.checkers),
        "faults": sorted(catalogue.faults),
        "strategies": sorted(catalogue.strategies),
        "launchers": sorted(catalogue.launchers),
        "workloads": sorted(catalogue.workloads),
    }


def _options(command: click.Command, name: str = "chaos") -> Iterator[str]:
    for one in command.params:
        yield f"{name} {max(one.opts, key=len) if one.opts else one.name}"
    if isinstance(command, click.Group):
        for word in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), word)
            if inner is not None:
                yield from _options(inner, f"{name} {word}")


def _keys(schema: Any) -> Iterator[str]:
    yield from schema["properties"]
    for name, model in schema["$defs"].items():
        yield from (f"{name}.{key}" for key in model.get("properties", {}))


if __name__ == "__main__":
    NAMES.write_text(json.dumps(public_names(), indent=1) + "\n")
