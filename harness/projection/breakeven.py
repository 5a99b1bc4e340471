"""Goodput over all sizes, and the sizes at which one strategy overtakes another."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from trainchaos.harness.projection.costs import RecoveryCost
from trainchaos.harness.projection.job import SPARES, formula, job_of, nodes_of
from trainchaos.harness.projection.parallel import Part
from trainchaos.harness.projection.presets import DAY_S
from trainchaos.harness.projection.result import BreakEven, Point, Projected, Setting
from trainchaos.harness.projection.simulate import events_expected

SMALLEST, LARGEST = 8, 131_072
TRIALS = 100
"""Of a size that was not asked for."""
MOST_EVENTS = 20_000
"""In a trial of such a size; a larger one has no point."""


def sizes(first: int, last: int) -> tuple[int, ...]:
    """Powers of two from ``first`` (or the next one) to ``last``."""
    return tuple(1 << k for k in range((first - 1).bit_length(), last.bit_length()))


def smallest(per_node: int, spares: int, copies: int, strategies: Collection[str]) -> int:
    """GPUs of the smallest job that a curve has: as many nodes as there are spares, if any strategy
    has them, and as hold a copy of the model (``copies``).
    """
    return max(SMALLEST, max(spares if SPARES in strategies else 1, copies) * per_node)


def curve(setting: Setting, costs: Mapping[str, RecoveryCost]) -> tuple[list[Point], list[Part]]:
    """The powers of two that were not asked for: goodput by formula, and of those without one what
    is to be played, with few trials.
    """
    found: list[Point] = []
    parts: list[Part] = []
    few = setting.model_copy(update={"trials": min(setting.trials, TRIALS)})
    least = smallest(setting.gpus_per_node, setting.spares, setting.replica_nodes, costs)
    for gpus in sizes(least, LARGEST):
        if gpus in setting.gpus:
            continue
        for name, cost in costs.items():
            job = job_of(setting, gpus, cost)
            share, _ = formula(setting, job)
            if share is not None:
                found.append(Point(strategy=name, gpus=gpus, goodput=share, error=0, by="formula"))
            elif events_expected(job, setting.days * DAY_S) <= MOST_EVENTS:
                parts.append(Part(few, gpus, cost))
    return found, parts


def break_even(
    setting: Setting,
    costs: Mapping[str, RecoveryCost],
    rows: Sequence[Projected],
    points: Sequence[Point],
) -> list[BreakEven]:
    """The sizes at which one strategy of a pair overtakes the other, smallest first. Between two
    sizes where each is ahead once, and beyond doubt: to a node by the formulas, else where the
    line between the two sizes (over the logarithm of GPUs) has equal goodput.
    """
    known = {(row.strategy, row.gpus): row.point for row in rows}
    known |= {(point.strategy, point.gpus): point for point in points}
    gpus = sorted({size for _, size in known})
    found = []
    for first, second in combinations(costs, 2):
        if {costs[first].kind, costs[second].kind} == {"measured", "published"}:
            continue  # of four processes here and thousands of GPUs there
        before: tuple[Point, Point] | None = None
        for size in gpus:
            pair = known.get((first, size)), known.get((second, size))
            if pair[0] is None or pair[1] is None or not pair[0].ahead_of(pair[1]):
                continue
            here = (pair[0], pair[1])
            if before is not None and before[0].ahead_of(before[1]) != here[0].ahead_of(here[1]):
                found.append(_between(setting, costs, before, here))
            before = here
    return sorted(found, key=lambda change: change.gpus)


def _between(
    setting: Setting,
    costs: Mapping[str, RecoveryCost],
    low: tuple[Point, Point],
    high: tuple[Point, Point],
) -> BreakEven:
    if low[0].ahead_of(low[1]) > 0:
        below, above = low
    else:
        above, below = low
    said = {
        "below": below.strategy,
        "above": above.strategy,
        "low": below.gpus,
        "high": high[0].gpus,
    }
    first, second = costs[below.strategy], costs[above.strategy]
    few, many = nodes_of(setting, low[0].gpus), nodes_of(setting, high[0].gpus)
    if all(point.by == "formula" for point in (*low, *high)):
        while many - few > 1:
            middle = (few + many) // 2
            apart = _apart(setting, middle * setting.gpus_per_node, first, second)
            if apart is None:
                break
            few, many = (middle, many) if apart > 0 else (few, middle)
        else:
            gpus = min(many * setting.gpus_per_node, high[0].gpus)
            return BreakEven(**said, gpus=gpus, by="formula")
    ahead = low[0].goodput - low[1].goodput
    behind = high[0].goodput - high[1].goodput
    share = ahead / (ahead - behind)
    doublings = math.log2(high[0].gpus / low[0].gpus)
    gpus = round(low[0].gpus * 2 ** (share * doublings))
    return BreakEven(**said, gpus=gpus, by="simulation")


def _apart(setting: Setting, gpus: int, one: RecoveryCost, other: RecoveryCost) -> float | None:
    """Goodput of one strategy less another's, by the formulas."""
    first, _ = formula(setting, job_of(setting, gpus, one))
    second, _ = formula(setting, job_of(setting, gpus, other))
    return None if first is None or second is None else first - second
