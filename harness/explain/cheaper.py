"""What would have cost less: the same fault under another strategy of the same run. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.cost import failure_cost
from trainchaos.harness.judge.results import CellResult, Results

LEAST = 3
"""Incidents of the other strategy without which nothing is said of it."""


@dataclass(frozen=True, kw_only=True)
class Cheaper:
    """Another strategy, under which each of ``n`` incidents of the same fault cost less than this
    one. ``rank_s``: their median, rank-seconds.
    """

    label: str
    rank_s: float
    n: int


def cost_of(results: Results, incident: Incident) -> float | None:
    """Rank-seconds of an incident: everything provisioned, times the recovery time, as the metric
    ``failure_cost`` (there in hours); infinity: the job never recovered; 0: training did not stand
    still; None: the arm is not in the results.
    """
    arm = (incident.cell, incident.repeat, "faulted")
    ranks = next(
        (a.provisioned_ranks for a in results.arms if (a.cell, a.repeat, a.arm) == arm), None
    )
    return None if ranks is None else 3600 * failure_cost(ranks, incident.recovery_time)


def cheaper_than(results: Results, incident: Incident) -> Cheaper | None:
    """The cheapest strategy that the run supports a claim for: its cell differs from the incident's
    in the strategy alone, it had at least ``LEAST`` incidents of the same fault, all landed, and
    each of them cost less. None: there is none, and nothing is to be said.
    """
    own = next((cell for cell in results.cells if cell.id == incident.cell), None)
    cost = cost_of(results, incident)
    if own is None or cost is None or not incident.landed:
        return None
    found: list[Cheaper] = []
    for cell in results.timed:
        costs = _costs(results, cell, incident.fault) if _comparable(cell, own) else []
        if len(costs) >= LEAST and max(costs) < cost:
            found.append(Cheaper(label=cell.label or cell.id, rank_s=median(costs), n=len(costs)))
    return min(found, key=lambda one: one.rank_s, default=None)


def _costs(results: Results, cell: CellResult, fault: str) -> Sequence[float]:
    of = [i for i in results.faults if i.cell == cell.id and i.fault == fault and i.fired]
    if not all(i.landed and i.answered_with is None for i in of):
        return []  # what did not land cost nothing; what another incident paid for looks cheap
    costs = [cost_of(results, one) for one in of]
    return [cost for cost in costs if cost is not None]


def _comparable(cell: CellResult, own: CellResult) -> bool:
    """Whether two cells differ in their strategy and in nothing else."""
    rest = [
        {name: value for name, value in one.params.items() if not _says_strategy(one, name, value)}
        for one in (cell, own)
    ]
    return cell.strategy != own.strategy and rest[0] == rest[1]


def _says_strategy(cell: CellResult, name: str, value: object) -> bool:
    """Whether a parameter of a cell is its strategy, by its value: users name them freely."""
    if isinstance(value, dict):
        return value.get("strategy") == cell.strategy and len(value) == 1
    return bool(name) and value == cell.strategy
