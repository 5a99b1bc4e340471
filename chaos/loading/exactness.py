"""Adds a repeat with elastic sums for strategies that continue with fewer ranks.

With fewer ranks, gradients are summed in another order, so the result is compared with a tolerance,
which can hide a state that is wrong in the same way on all ranks. With elastic sums the order is
the same for any number of ranks, and the result must match the control arm bit for bit. One such
repeat is enough; all others keep the job's normal sums, and so its normal times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.model import Cell, InvariantExclusion, Scenario

AXIS = "determinism"
JUDGED_BY = "loss-equality"


def beside(cell: Cell, tree: Mapping[str, Any], catalogue: Catalogue) -> Cell | None:
    """The cell that plays ``cell`` once with elastic sums, without SLAs. None if it would add
    nothing, cannot be played, or the scenario's ``tree`` sets ``workload.determinism`` itself.
    """
    scenario = cell.scenario
    if AXIS in tree["workload"] or not _may_differ(scenario, catalogue) or not _compared(scenario):
        return None
    workload = scenario.workload.model_copy(update={AXIS: "elastic"})
    once = scenario.model_copy(update={"workload": workload, "repeat": 1, "sla": {}})
    name = f"{AXIS}=elastic"
    return Cell(
        id=f"{cell.id},{name}" if cell.params else name,
        params={**cell.params, AXIS: "elastic"},
        scenario=once,
        exact_for=cell.id,
    )


def _may_differ(scenario: Scenario, catalogue: Catalogue) -> bool:
    """Whether the strategy does not promise an exact result, and elastic sums would give one."""
    work = scenario.workload
    if (
        work.command is not None
        or work.shards > 1
        or scenario.recovery.params.get("batch") == "shrink"
    ):
        return False
    strategy, kind = (
        catalogue.strategies[scenario.recovery.strategy],
        catalogue.workloads[work.kind],
    )
    return not getattr(strategy, "exact", True) and bool(getattr(kind, "cuts_batches", False))


def _compared(scenario: Scenario) -> bool:
    """Whether the job has faults, and its result is compared with the control arm's."""
    asked = scenario.invariants
    if isinstance(asked, InvariantExclusion):
        judged = JUDGED_BY not in asked.leave_out
    else:
        judged = isinstance(asked, str) or JUDGED_BY in asked
    return judged and bool(scenario.faults) and scenario.baseline == "paired"
