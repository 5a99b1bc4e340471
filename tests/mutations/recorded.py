"""Arms of real runs as bases, stored beside this file: what a simulator cannot play, a command and
nodes with agents.

``python -m mutations.recorded RUN ARM INTO``, from ``tests``, stores one arm of a run directory
anew, without what would tell on which machine it was played. ``INTO``: ``<base>/faulted`` or
``<base>/control``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from trainchaos.chaos.events.log import Event, read_actor
from trainchaos.chaos.scenario.model import ResolvedRun
from trainchaos.harness.host.rundir import RunDirectory, read_resolved

STORED = Path(__file__).with_name("stored")
_OF_A_MACHINE = {"host": "host", "boot": "boot", "data": "", "data_digest": ""}


def resolved_of(name: str, arm: str) -> ResolvedRun:
    """What an arm was to be."""
    return read_resolved(RunDirectory(STORED / name / arm))


def events_of(name: str, arm: str) -> dict[str, tuple[Event, ...]]:
    """What it wrote."""
    return {
        path.stem: read_actor(path).events for path in sorted((STORED / name / arm).glob("*.jsonl"))
    }


def keep(run: Path, arm: str, into: Path) -> None:
    """Store an arm."""
    into.mkdir(parents=True)
    found = read_resolved(RunDirectory(run)).model_dump(mode="json", by_alias=True)
    found |= {"source": "", "reproduce": "", "lines": {}}
    for cell in found["cells"]:
        spec = cell["scenario"]["workload"]
        spec |= {"env": {}, "directory": "."} if spec["command"] else {}
        spec["command"] = _plain(spec["command"])
    with (into / "scenario.resolved.yaml").open("w") as stream:
        YAML(typ="safe", pure=True).dump(found, stream)
    for path in sorted((run / "events" / arm).glob("*.jsonl")):
        lines = (_without_a_machine(event).to_line() for event in read_actor(path).events)
        (into / path.name).write_text("".join(f"{line}\n" for line in lines))


def _without_a_machine(event: Event) -> Event:
    for key in _OF_A_MACHINE.keys() & event.data.keys():
        event.data[key] = _OF_A_MACHINE[key]  # type: ignore[index]
    if "argv" in event.data:
        event.data["argv"] = _plain(event.data["argv"])  # type: ignore[index]
    return event


def _plain(argv: list[str] | None) -> Any:
    """Without the folders of programs."""
    return argv and [re.sub(r"^/.*/", "", word) for word in argv]


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2], STORED / sys.argv[3])
