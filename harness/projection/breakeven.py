"""Goodput over all sizes, and the sizes at which one strategy overtakes another."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from trainchaos.harness.projection.costs import RecoveryCost
from trainchaos.harness.projection.figures import Part
from trainchaos.harness.projection.job import SPARES, formula, job_of
from trainchaos.harness.projection.presets import DAY_S
from trainchaos.harness.projection.result import BreakEven, Point, Projected, Setting, t95
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
    points: list[Point] = []
    parts: list[Part] = []
    few = setting.model_copy(update={"trials": min(setting.trials, TRIALS)})
    least = smallest(setting.gpus_per_node, setting.spares, setting.replica_nodes, costs)
    for gpus in sizes(least, LARGEST):
        for name, cost in costs.items() if gpus not in setting.gpus else ():
            job = job_of(setting, gpus, cost)
            share, _ = formula(setting, job)
            if share is not None:
                points.append(Point(strategy=name, gpus=gpus, goodput=share, error=0, by="formula"))
            elif events_expected(job, setting.days * DAY_S) <= MOST_EVENTS:
                parts.append(Part(few, gpus, cost))
    return points, parts


def break_even(
    setting: Setting,
    costs: Mapping[str, RecoveryCost],
    rows: Sequence[Projected],
    points: Sequence[Point],
) -> list[BreakEven]:
    """The sizes at which one strategy of a pair overtakes the other, smallest first. Between two
    sizes where each is ahead once, and beyond doubt of the simulation: to a node by the formulas,
    else where the line between the two sizes (over the logarithm of GPUs) has equal goodput.
    """
    off = formulas_fail(rows)
    known = {(p.strategy, p.gpus): p for p in (*(row.point for row in rows), *points)}
    gpus = sorted({size for _, size in known})
    changes: list[BreakEven] = []
    for first, second in combinations(costs, 2):
        if {costs[first].kind, costs[second].kind} == {"measured", "published"}:
            continue  # of four processes here and thousands of GPUs there
        both = [
            (known[first, size], known[second, size])
            for size in gpus
            if (first, size) in known and (second, size) in known
        ]
        exact = not {first, second} & off
        changes += _changes(setting, (costs[first], costs[second]), both, exact)
    return sorted(changes, key=lambda change: change.gpus)


def formulas_fail(rows: Sequence[Projected]) -> set[str]:
    """Strategies of which a row shows that the formulas do not hold for such a job."""
    return {row.strategy for row in rows if row.differs}


def _changes(
    setting: Setting,
    pair: tuple[RecoveryCost, RecoveryCost],
    points: Sequence[tuple[Point, Point]],
    exact: bool,
) -> list[BreakEven]:
    """Each size at which one of the pair overtakes the other."""
    ahead = {n: one.ahead_of(other) for n, (one, other) in enumerate(points)}
    sure = [n for n in ahead if ahead[n]]
    turns = [(low, high) for low, high in pairwise(sure) if ahead[low] != ahead[high]]
    starts = [0, *(high for _, high in turns)]
    ends = [*(low for low, _ in turns[1:]), len(points) - 1]
    changes = []
    for (low, high), start, end in zip(turns, starts, ends, strict=False):
        # between the two nobody knows
        numbers = [*range(start, low + 1), *range(high, end + 1)]
        here = [points[n][:: ahead[low]] for n in numbers]
        below, above = pair[:: ahead[low]]
        changes.append(_Turn(setting, below, above, here, low - start, exact).change())
    return changes


@dataclass(frozen=True)
class _Turn:
    """The one of two strategies that is ahead below, and the one above; their goodput at sizes of
    which that with number ``last`` is the last below. ``exact``: the formulas hold for both.
    """

    setting: Setting
    below: RecoveryCost
    above: RecoveryCost
    points: Sequence[tuple[Point, ...]]
    last: int
    exact: bool

    def change(self) -> BreakEven:
        """Its interval ends where the distance of the two is as large as what is unknown of it."""
        last = self.last
        gpus = self._crossing(last, 0.0)
        upper = range(last + 1, len(self.points))
        least = next((n for n in range(last, -1, -1) if self._at(n, -1.0) > 0), None)
        most = next((n for n in upper if self._at(n, 1.0) <= 0), None)
        return BreakEven(
            below=self.below.strategy,
            above=self.above.strategy,
            gpus=gpus,
            low=self.points[last][0].gpus,
            high=self.points[last + 1][0].gpus,
            least=None if least is None else min(gpus, self._crossing(least, -1.0)),
            most=None if most is None else max(gpus, self._crossing(most - 1, 1.0)),
            by="formula" if self._exact(last) else "simulation",
        )

    def _exact(self, number: int) -> bool:
        """Whether the formulas hold between this size and the next."""
        points = (*self.points[number], *self.points[number + 1])
        return self.exact and all(point.by == "formula" for point in points)

    def _crossing(self, number: int, unsure: float) -> int:
        """GPUs at which ``_apart`` is zero between this size and the next: to a node by the
        formulas, else by the line between the two.
        """
        few, many = self.points[number][0].gpus, self.points[number + 1][0].gpus
        if self._exact(number):
            step = self.setting.gpus_per_node
            nodes = range(few // step + 1, math.ceil(many / step))
            first = bisect_left(nodes, True, key=lambda n: self._apart(n * step, unsure) <= 0)
            return min(many, (nodes.start + first) * step)
        ahead, behind = self._at(number, unsure), self._at(number + 1, unsure)
        return round(few * (many / few) ** (ahead / (ahead - behind)))

    def _at(self, number: int, unsure: float) -> float:
        points = self.points[number]
        return self._apart(points[0].gpus, unsure, points)

    def _apart(self, gpus: int, unsure: float, points: Sequence[Point] = ()) -> float:
        """Goodput of the one that is ahead below less the other's at a size, by these points or the
        formulas, and ``unsure`` times what is unknown of it.
        """
        costs = (self.below, self.above)
        shares = [point.goodput for point in points] or [
            formula(self.setting, job_of(self.setting, gpus, cost))[0] or 0.0 for cost in costs
        ]
        unknown = [
            _unknown(self.setting, gpus, cost, share)
            for cost, share in zip(costs, shares, strict=True)
        ]
        chance = t95(min(self.setting.trials, TRIALS) - 1)
        unknown += [chance * point.error for point in points]
        return shares[0] - shares[1] + unsure * math.hypot(*unknown)


def _unknown(setting: Setting, gpus: int, cost: RecoveryCost, goodput: float) -> float:
    """What goodput loses if the mean recovery is as long as its 95 % interval allows: by the
    formulas, where there are any, else as if stalls came one after another.
    """
    if not cost.unsure_s:
        return 0.0
    job = job_of(setting, gpus, cost)
    usual, longer = (formula(setting, job, by_s)[0] for by_s in (0.0, cost.unsure_s))
    if usual is None or longer is None:
        return goodput * cost.unsure_s / (job.between.mean_s + job.stall.mean_s)
    return usual - longer
