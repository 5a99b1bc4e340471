"""Goodput over all sizes, and the sizes at which one strategy overtakes another."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from trainchaos.harness.projection.costs import RecoveryCost
from trainchaos.harness.projection.job import SPARES, formula, job_of, nodes_of
from trainchaos.harness.projection.parallel import Part
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
    sizes where each is ahead once, and beyond doubt of the simulation: to a node by the formulas,
    else where the line between the two sizes (over the logarithm of GPUs) has equal goodput.
    """
    off = formulas_fail(rows)
    known = {(row.strategy, row.gpus): row.point for row in rows}
    known |= {(point.strategy, point.gpus): point for point in points}
    gpus = sorted({size for _, size in known})
    found: list[BreakEven] = []
    for first, second in combinations(costs, 2):
        if {costs[first].kind, costs[second].kind} == {"measured", "published"}:
            continue  # of four processes here and thousands of GPUs there
        both = [(known.get((first, size)), known.get((second, size))) for size in gpus]
        there = [(one, other) for one, other in both if one is not None and other is not None]
        exact = not {first, second} & off
        found += _Pair(setting, costs[first], costs[second], there, exact).changes()
    return sorted(found, key=lambda change: change.gpus)


def formulas_fail(rows: Sequence[Projected]) -> set[str]:
    """Strategies of which a row shows that the formulas do not hold for such a job."""
    return {row.strategy for row in rows if row.differs}


@dataclass(frozen=True)
class _Pair:
    """Two strategies, and their goodput at each size where both have one, smallest first.
    ``exact``: the formulas hold for both.
    """

    setting: Setting
    first: RecoveryCost
    second: RecoveryCost
    points: Sequence[tuple[Point, Point]]
    exact: bool

    def changes(self) -> list[BreakEven]:
        """Each size at which one overtakes the other."""
        ahead = {n: one.ahead_of(other) for n, (one, other) in enumerate(self.points)}
        sure = [n for n in ahead if ahead[n]]
        turns = [(low, high) for low, high in pairwise(sure) if ahead[low] != ahead[high]]
        starts = [0, *(high for _, high in turns)]
        ends = [*(low for low, _ in turns[1:]), len(self.points) - 1]
        return [
            self._change(low, high, start, end, ahead[low])
            for (low, high), start, end in zip(turns, starts, ends, strict=False)
        ]

    def _change(self, low: int, high: int, start: int, end: int, sign: int) -> BreakEven:
        """Between sizes number ``low`` and ``high``; from ``start`` to ``end`` there is no other.
        ``sign``: 1 if the first is ahead below, -1 if the second is.

        Its interval ends where the distance of the two is as large as what is unknown of it.
        """
        gpus, exact = self._crossing(low, high, sign, 0.0)
        least = next((n for n in range(low, start - 1, -1) if self._apart(n, sign, -1.0) > 0), None)
        most = next((n for n in range(high, end + 1) if self._apart(n, sign, 1.0) <= 0), None)
        below, above = (self.first, self.second)[::sign]
        return BreakEven(
            below=below.strategy,
            above=above.strategy,
            gpus=gpus,
            low=self.points[low][0].gpus,
            high=self.points[high][0].gpus,
            least=None
            if least is None
            else min(gpus, self._crossing(least, high if least == low else least + 1, sign, -1)[0]),
            most=None
            if most is None
            else max(gpus, self._crossing(low if most == high else most - 1, most, sign, 1)[0]),
            by="formula" if exact else "simulation",
        )

    def _apart(self, number: int, sign: int, unsure: float) -> float:
        """Goodput of the one that is ahead below less the other's at a size, and so many times
        what is unknown of it.
        """
        one, other = self.points[number]
        trials = min(self.setting.trials, TRIALS)
        chance = t95(trials - 1) * math.hypot(one.error, other.error)
        unknown = math.hypot(
            chance,
            _unknown(self.setting, one.gpus, self.first, one.goodput),
            _unknown(self.setting, one.gpus, self.second, other.goodput),
        )
        return sign * (one.goodput - other.goodput) + unsure * unknown

    def _crossing(self, low: int, high: int, sign: int, unsure: float) -> tuple[int, bool]:
        """GPUs at which ``_apart`` is zero between two sizes, and whether by the formulas alone."""
        here, there = self.points[low], self.points[high]
        if self.exact and all(point.by == "formula" for point in (*here, *there)):
            per_node = self.setting.gpus_per_node
            few, many = (nodes_of(self.setting, both[0].gpus) for both in (here, there))
            while many - few > 1:
                middle = (few + many) // 2
                apart = self._by_formula(middle * per_node, sign, unsure)
                if apart is None:
                    break
                few, many = (middle, many) if apart > 0 else (few, middle)
            else:
                return min(many * per_node, there[0].gpus), True
        ahead, behind = (self._apart(number, sign, unsure) for number in (low, high))
        doublings = math.log2(there[0].gpus / here[0].gpus)
        return round(here[0].gpus * 2 ** (ahead / (ahead - behind) * doublings)), False

    def _by_formula(self, gpus: int, sign: int, unsure: float) -> float | None:
        """``_apart`` at any size; None where there is no formula."""
        one, _ = formula(self.setting, job_of(self.setting, gpus, self.first))
        other, _ = formula(self.setting, job_of(self.setting, gpus, self.second))
        if one is None or other is None:
            return None
        unknown = math.hypot(
            _unknown(self.setting, gpus, self.first, one),
            _unknown(self.setting, gpus, self.second, other),
        )
        return sign * (one - other) + unsure * unknown


def _unknown(setting: Setting, gpus: int, cost: RecoveryCost, goodput: float) -> float:
    """What goodput loses if the mean recovery is as long as its 95 % interval allows: by the
    formulas, where there are any, else as if stalls came one after another.
    """
    if not cost.unsure_s:
        return 0.0
    job = job_of(setting, gpus, cost)
    usual, _ = formula(setting, job)
    least, _ = formula(setting, replace(job, stall=job.stall.longer(cost.unsure_s)))
    if usual is None or least is None:
        return goodput * cost.unsure_s / (job.between.mean_s + job.stall.mean_s)
    return usual - least
