"""The repeat with elastic sums that a strategy adds to its own where it continues with fewer ranks.

With fewer ranks gradients are summed in another order, so that the result is judged by a band, in
which a state that is wrong and the same on all ranks can hide. With elastic sums the order is the
same for any number of ranks, and the result has to be the control arm's bit for bit. One such
repeat shows it; all others keep the sums, and so the times, of the job as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaos.scenario.catalogue import Catalogue
from chaos.scenario.model import Cell, LeaveOut, Scenario

AXIS = "determinism"
JUDGED_BY = "loss-equality"


def beside(cell: Cell, tree: Mapping[str, Any], catalogue: Catalogue) -> Cell | None:
    """The cell that plays ``cell`` once with elastic sums, without SLAs; None where it would show
    nothing more, cannot be played, or was decided by the scenario, whose ``tree`` says
    ``workload.determinism``.
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
    """Whether the strategy promises no exact result, and elastic sums would give one."""
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
    """Whether something is done to the job, and its result judged by the control arm's."""
    asked = scenario.invariants
    if isinstance(asked, LeaveOut):
        judged = JUDGED_BY not in asked.leave_out
    else:
        judged = asked == "default" or JUDGED_BY in asked
    return judged and bool(scenario.faults) and scenario.baseline == "paired"
