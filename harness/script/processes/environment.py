"""Prepares a command's environment: the harness's variables, and those of its scenario."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainchaos import beacon
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.script.processes.tree import RANK_NAMES, WORLD_NAMES

MARK = "CHAOS_COMMAND"
"""Names one arm's command; every process of it inherits it."""
_OURS = re.compile(r"\$(CHAOS_[A-Z]+)")


@dataclass(frozen=True, kw_only=True)
class PreparedCommand:
    """A command ready to start. ``scratch``: an empty directory of the arm, kept across
    restarts; ``heard``: the file, with wildcards, that its progress is read from, if it is not
    its output.
    """

    argv: tuple[str, ...]
    directory: Path
    env: Mapping[str, str]
    mark: str
    scratch: Path
    output: Path
    reports: Path
    points: Path
    heard: Path | None = None


def prepare(setup: ArmSetup) -> PreparedCommand:
    """Prepare the command. ``$CHAOS_...`` is replaced in the command, in ``env`` and in the
    checkpoint directory.
    """
    spec: WorkloadSpec = setup.cell.scenario.workload
    logs, scratch = setup.run.logs(setup.id).absolute(), setup.checkpoints.absolute()
    mark = f"{setup.id}-{secrets.token_hex(4)}"
    ours = {
        MARK: mark,
        "CHAOS_ARM": setup.arm,
        "CHAOS_SEED": str(setup.seed),
        "CHAOS_RANKS": str(spec.ranks),
        "CHAOS_STEPS": str(spec.steps),
        "CHAOS_SCRATCH": str(scratch),
        beacon.VARIABLE: str(logs / "beacon.txt"),
    } | ({beacon.POINTS: str(logs / "points.txt")} if spec.points else {})
    # A harness that itself runs in a job must not make every process below it rank 0 of that job.
    foreign = {*RANK_NAMES, *WORLD_NAMES, beacon.POINTS, *([spec.group] if spec.group else ())}
    env = {name: value for name, value in os.environ.items() if name not in foreign}
    env |= (
        {"PYTHONUNBUFFERED": "1"}
        | {name: _fill(value, ours) for name, value in spec.env.items()}
        | ours
    )
    env["PATH"] = search_path(spec.env)
    where = Path(spec.directory).absolute()
    return PreparedCommand(
        argv=tuple(_fill(word, ours) for word in spec.command or ()),
        directory=where,
        env=env,
        mark=mark,
        scratch=scratch,
        output=logs / "output.log",
        reports=logs / "beacon.txt",
        points=logs / "points.txt",
        heard=_heard(spec, where, ours),
    )


def _heard(spec: WorkloadSpec, where: Path, ours: Mapping[str, str]) -> Path | None:
    file = None if spec.progress == "beacon" else spec.progress.file
    return where / _fill(file, ours) if file is not None else None


def checkpoint_directory(setup: ArmSetup) -> Path | None:
    """The command's checkpoint directory, if the scenario names it."""
    spec = setup.cell.scenario.workload
    if spec.checkpoint.directory is None:
        return None
    ours = {
        "CHAOS_SCRATCH": str(setup.checkpoints.absolute()),
        "CHAOS_ARM": setup.arm,
        "CHAOS_SEED": str(setup.seed),
    }
    return Path(spec.directory).absolute() / _fill(spec.checkpoint.directory, ours)


def search_path(env: Mapping[str, str]) -> str:
    """Where the program is searched: PATH, then the directory of the harness's Python (which has
    torchrun).
    """
    return os.pathsep.join(
        [env.get("PATH") or os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    )


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _OURS.sub(lambda match: values.get(match[1], match[0]), text)
