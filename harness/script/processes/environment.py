"""Prepares a command: its environment of the harness's variables and those of its scenario, and
whether it can be started here at all.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainchaos import beacon
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.launch.launcher import ArmSetup

MARK = "CHAOS_COMMAND"
"""Names one arm's command; every process of it inherits it."""
RANK_NAMES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
WORLD_NAMES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "LOCAL_WORLD_SIZE")
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
    spec, logs = setup.cell.scenario.workload, setup.run.logs(setup.id).absolute()
    mark = f"{setup.id}-{secrets.token_hex(4)}"
    ours = _ours(setup) | {
        MARK: mark,
        "CHAOS_RANKS": str(spec.ranks),
        "CHAOS_STEPS": str(spec.steps),
        beacon.VARIABLE: str(logs / "beacon.txt"),
    }
    if spec.points:
        ours[beacon.POINTS] = str(logs / "points.txt")
    # A harness that itself runs in a job must not make every process below it rank 0 of that job.
    foreign = {*RANK_NAMES, *WORLD_NAMES, beacon.POINTS, *([spec.group] if spec.group else ())}
    env = {name: value for name, value in os.environ.items() if name not in foreign}
    env |= {"PYTHONUNBUFFERED": "1"}
    env |= {name: _fill(value, ours) for name, value in spec.env.items()} | ours
    env["PATH"] = search_path(spec.env)
    where = Path(spec.directory).absolute()
    file = None if spec.progress == "beacon" else spec.progress.file
    return PreparedCommand(
        argv=tuple(_fill(word, ours) for word in spec.command or ()),
        directory=where,
        env=env,
        mark=mark,
        scratch=setup.checkpoints.absolute(),
        output=logs / "output.log",
        reports=logs / "beacon.txt",
        points=logs / "points.txt",
        heard=where / _fill(file, ours) if file is not None else None,
    )


def checkpoint_directory(setup: ArmSetup) -> Path | None:
    """The command's checkpoint directory, if the scenario names it."""
    spec = setup.cell.scenario.workload
    if spec.checkpoint.directory is None:
        return None
    return Path(spec.directory).absolute() / _fill(spec.checkpoint.directory, _ours(setup))


def _ours(setup: ArmSetup) -> dict[str, str]:
    return {
        "CHAOS_SCRATCH": str(setup.checkpoints.absolute()),
        "CHAOS_ARM": setup.arm,
        "CHAOS_SEED": str(setup.seed),
    }


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _OURS.sub(lambda match: values.get(match[1], match[0]), text)


def search_path(env: Mapping[str, str]) -> str:
    """Where the program is searched: PATH, then the directory of the harness's Python (which has
    torchrun).
    """
    return os.pathsep.join(
        [env.get("PATH") or os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    )


def refuse_unstartable(cell: Cell, place: str) -> None:
    """Raise ScenarioError if the cell's command does not exist. ``place``: of the command,
    ``file:line``.

    The program is searched as a shell would: in PATH (that of ``workload.env`` if it sets one), or,
    with a slash in it, below ``workload.directory``.
    """
    spec = cell.scenario.workload
    if spec.command is None:
        return
    directory, program = Path(spec.directory).absolute(), spec.command[0]
    if not directory.is_dir():
        raise ScenarioError(
            f"{place}: workload.directory {spec.directory!r} is not a directory",
            hint="it is relative to the scenario file",
        )
    if program.startswith("$"):
        return
    if "/" in program:
        path = directory / program
        found = path.is_file() and os.access(path, os.X_OK)
        where = f"in {directory}" if not path.exists() else "as an executable file"
    else:
        found = shutil.which(program, path=search_path(spec.env)) is not None
        where = "in PATH"
    if not found:
        raise ScenarioError(
            f"{place}: workload.command: {program!r} is not found {where}",
            hint=(
                "correct the program's name, set workload.directory, or activate its environment"
                " first"
            ),
        )
