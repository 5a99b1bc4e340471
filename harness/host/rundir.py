"""The layout of a run directory, known only to this module.

runs/<scenario>/<utc>-<seed>/
    scenario.resolved.yaml  system.json  ledger.jsonl
    events/<arm>/<actor>.jsonl  logs/<arm>/<actor>.log  checkpoints/<arm>/
    results.json  junit.xml  summary.md  report.html  trace.json  metrics.prom     (derived)
    gate.json  gate.xml  gate.md     (of ``chaos run --gate`` and ``chaos gate``)
    refused.log     (connections refused as a node's agent, with reasons)
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.composer import Composer
from ruamel.yaml.events import AliasEvent

from trainchaos.chaos.errors import (
    DamagedRun,
    InfrastructureError,
    LogError,
    NewerVersion,
    NoRun,
)
from trainchaos.chaos.files import is_part, read_bytes, read_json, reason
from trainchaos.chaos.scenario.model import ResolvedRun
from trainchaos.chaos.source.source import VERSION as SCENARIO_VERSION

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
MAX_RESOLVED_BYTES = 8 << 20  # a cell takes 3 kB


def arm_id(cell: str, repeat: int, arm: str) -> str:
    """Directory name of one arm: ``recovery=hot-spare.r0.faulted``."""
    return f"{cell}.r{repeat}.{arm}"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    root: Path

    @property
    def resolved(self) -> Path:
        """The resolved scenario."""
        return self.root / "scenario.resolved.yaml"

    @property
    def system(self) -> Path:
        """Machine and software versions."""
        return self.root / "system.json"

    @property
    def ledger(self) -> Path:
        """Undo records, each written before its fault acts."""
        return self.root / "ledger.jsonl"

    @property
    def results(self) -> Path:
        """Derived results."""
        return self.root / "results.json"

    def events(self, arm: str) -> Path:
        """Event logs of one arm."""
        return self.root / "events" / _inside(arm)

    def logs(self, arm: str) -> Path:
        """Standard output and error of one arm's processes."""
        return _plain(self.root / "logs", arm)

    def checkpoints(self, arm: str) -> Path:
        return _plain(self.root / "checkpoints", arm)

    def arms(self) -> list[str]:
        """Names of the arms that left events."""
        events = self.root / "events"
        return sorted(p.name for p in events.iterdir() if p.is_dir()) if events.is_dir() else []

    def make_arm(self, arm: str) -> None:
        """Create the directories of one arm. Raises InfrastructureError if the disk refuses."""
        for path in (self.events(arm), self.logs(arm), self.checkpoints(arm)):
            _mkdir(path)


def create_run(base: Path, scenario: str, seed: int, now: datetime) -> RunDirectory:
    """Make ``base/<scenario>/<utc>-<seed>``. Raises InfrastructureError."""
    stem = f"{now:%Y-%m-%dT%H-%M-%S}-{seed}"
    parent = base / scenario
    _mkdir(parent)
    for attempt in range(100):
        name = stem if attempt == 0 else f"{stem}.{attempt}"
        try:
            (parent / name).mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise _cannot_write(parent / name, error) from error
        return RunDirectory(parent / name)
    raise InfrastructureError(f"100 runs named {stem} exist in {parent}", hint="remove old runs")


def point_latest(run: RunDirectory) -> None:
    """Point the link ``latest`` beside the run to it. Raises InfrastructureError if the disk
    refuses.
    """
    link = run.root.parent / "latest"
    temporary = run.root.parent / f".latest-{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(run.root.name)
        temporary.replace(link)
    except OSError as error:
        raise _cannot_write(link, error) from error


def open_run(path: Path) -> RunDirectory:
    """The run directory at a path, through ``latest`` links. Raises NoRun if it is not one."""
    run = RunDirectory(path.resolve())
    if not run.resolved.is_file():
        raise no_run(path, f" (no {run.resolved.name})")
    return run


def no_run(path: Path, why: str = "") -> NoRun:
    """The error for a path that is not a run directory. ``why``: what is missing in it."""
    if not os.path.lexists(path):
        why = ": it does not exist"
    return NoRun(
        f"{path} is not a run directory{why}",
        hint="runs lie in runs/<scenario>/<time>-<seed>; 'ls -d runs/*/*' lists them",
    )


def write_resolved(run: RunDirectory, resolved: ResolvedRun) -> None:
    """Store the resolved scenario for people and for ``chaos analyze``."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 120
    with run.resolved.open("w") as stream:
        yaml.dump(resolved.model_dump(mode="json"), stream)


def read_resolved(run: RunDirectory) -> ResolvedRun:
    """Read the resolved scenario back. Raises DamagedRun if it is damaged, NewerVersion."""
    try:
        tree = _plain_yaml(read_bytes(run.resolved, most=MAX_RESOLVED_BYTES))
        _refuse_newer(tree, run.resolved)
        return ResolvedRun.model_validate(tree)
    except (ValueError, YAMLError, OSError, RecursionError, TypeError, LookupError) as error:
        raise DamagedRun(f"{run.resolved} is damaged: {reason(error)}") from error


def _refuse_newer(tree: Any, path: Path) -> None:
    """Raise NewerVersion for scenarios of a newer version; anything may be there."""
    cells = tree.get("cells") if isinstance(tree, dict) else None
    for cell in cells if isinstance(cells, list) else ():
        scenario = cell.get("scenario") if isinstance(cell, dict) else None
        version = scenario.get("version") if isinstance(scenario, dict) else None
        if type(version) is int and version > SCENARIO_VERSION:
            raise NewerVersion(path, version, SCENARIO_VERSION)


class _NoAlias(Composer):
    """Refuses aliases: each can stand for as much as the text before it, so that a few lines could
    exceed any memory.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As in the base; raises YAMLError for an alias."""
        if self.parser.check_event(AliasEvent):
            raise YAMLError("it has an alias, which no run writes")
        return super().compose_node(parent, index)


def _plain_yaml(data: bytes) -> Any:
    yaml = YAML(typ="safe", pure=True)
    yaml.Composer = _NoAlias
    return yaml.load(data.decode())


def _inside(arm: str) -> str:
    if not is_part(arm):
        raise LogError(
            f"{arm[:120]!r} is not the name of an arm: it leads out of the run directory"
        )
    return arm


def _plain(folder: Path, arm: str) -> Path:
    """An arm's directory whose path a command is told: parsers of options and of configurations
    take ``=`` and ``,`` for theirs. Runs of before have them.
    """
    plain = _NOT_PLAIN.sub("-", _inside(arm))
    if plain == arm or (folder / arm).is_dir():
        return folder / arm
    return folder / f"{plain}.{zlib.crc32(arm.encode()):08x}"  # no other arm's


def _mkdir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> InfrastructureError:
    return InfrastructureError(
        f"cannot create {path}: {error.strerror}",
        hint="choose another place with --runs, or free disk space",
    )


def read_system(run: RunDirectory) -> dict[str, Any]:
    """Facts about the machine of a run; empty if they cannot be read."""
    try:
        found = read_json(run.system)
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    if not isinstance(found.get("versions", {}), dict):
        del found["versions"]  # readers of system facts iterate over it as a mapping
    return found
