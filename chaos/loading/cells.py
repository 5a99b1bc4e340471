"""Selects cells of a scenario's matrix."""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import LoadedScenario
from trainchaos.chaos.scenario.model import Cell
from trainchaos.chaos.source.diagnostics import unknown


def chosen(loaded: LoadedScenario, only: Sequence[str]) -> tuple[Cell, ...]:
    """The cells named by ``--cell``; all without it. Raises ScenarioError for an unknown cell."""
    known = [cell.id for cell in loaded.cells]
    for name in only:
        if name not in known:
            raise ScenarioError(f"--cell: {unknown('cell', name, known)}")
    return tuple(cell for cell in loaded.cells if cell.among(only))
