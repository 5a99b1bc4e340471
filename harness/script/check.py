"""Checks whether a command can be started here, before anything runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.script.processes.environment import search_path


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
