"""What the faults of a cell need of its launcher, and whether it can meet the needs here
and now.
"""

from __future__ import annotations

from typing import Any

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.fault.build import build_all
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.launch.launcher import Launcher


def needs_of(cell: Cell) -> frozenset[Need]:
    """Everything the cell's faults need. The control arm gets the same, so that the pair stays
    comparable.
    """
    faults = build_all(cell.scenario.faults).values()
    return frozenset(need for fault in faults for need in fault.wants())


def parameters(cell: Cell, name: str) -> list[Any]:
    """Values of the parameter ``name`` in the cell's faults, including defaults."""
    faults = build_all(cell.scenario.faults).values()
    return [getattr(fault, name) for fault in faults if name in type(fault).model_fields]


def refuse_impossible(cell: Cell, launcher: Launcher) -> None:
    """Raise ScenarioError if the launcher can never meet a need of a fault."""
    made = build_all(cell.scenario.faults)
    for fault in cell.scenario.faults:
        wanting = sorted(made[fault.id].wants() - launcher.offers)
        if wanting:
            raise ScenarioError(
                f"fault {fault.id!r} ({fault.kind}) needs {', '.join(wanting)}, "
                f"which launcher {cell.scenario.launcher.kind} does not offer",
                hint=(
                    "use another launcher, or leave the fault out; chaos list faults shows what"
                    " each launcher can do"
                ),
            )


def lacking(cell: Cell, launcher: Launcher) -> str | None:
    """Why the launcher cannot meet a need on this machine now, such as a missing privilege; None if
    it can.
    """
    for need in sorted(needs_of(cell)):
        reason = launcher.lacks(need)
        if reason:
            return f"{need}: {reason}"
    return None
