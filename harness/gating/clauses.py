"""What a run shows about a clause with confidence: bounds of what it is about, against its limit.

The unit is the arm. Values of one arm are correlated, so each arm counts once: with its own median
or quantile, or with its worst value if the clause is about every value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainchaos.chaos.scenario.sla import QUANTILES, Clause, parse_clause
from trainchaos.chaos.stats import (
    LEVEL,
    next_beyond,
    percentile,
    quantile_bounds,
    values_to_bound,
    values_to_predict,
    values_to_settle,
)
from trainchaos.chaos.units import counted
from trainchaos.harness.judge.measure.samples import per_arm
from trainchaos.harness.judge.results import SlaResult, Verdict, merge
from trainchaos.harness.judge.verdict.gates import quantity


@dataclass(frozen=True, kw_only=True)
class ClauseDecision:
    """``needed``: total arms that would settle it; None: it is settled, or more would not help.
    ``surely``: that many settle it if none breaks the limit; otherwise in 4 of 5 cases.
    """

    verdict: Verdict
    detail: str
    needed: int | None = None
    surely: bool = False


def is_statistical(sla: SlaResult) -> bool:
    """Whether chance can break a clause that holds, which is so if it has a quantile. The others
    are broken for certain by one counterexample.
    """
    return bool(sla.values) and _quantile(parse_clause(sla.clause, sla.unit)) is not None


def decide(
    sla: SlaResult, level: float, *, clock_bound: float = 0.0, green: float = LEVEL
) -> ClauseDecision:
    """Judge a clause by the bounds of its aggregate. ``level``: how often it may fail by chance
    alone; ``clock_bound``: largest error of each value, in the metric's unit; ``green``: how often
    it may pass by chance alone.

    The median and p90 to p99 have order-statistic bounds. ``max <``, ``min >`` and ``all`` are
    about each value: one that breaks the limit is proof, and if none of so many arms breaks it,
    that bounds the next one (``next_beyond``). ``max >`` and ``min <`` can only be shown to hold. A
    mean has no bound without an assumption about its distribution (Bahadur and Savage 1956). Raises
    ClauseError for a clause that cannot be read.
    """
    if not sla.values:
        return ClauseDecision(verdict="inconclusive", detail=sla.detail)
    clause = parse_clause(sla.clause, sla.unit)
    if clause.op != "==":
        return _Side(clause, sla, level, green, clock_bound).decision()
    # equal means neither above nor below, each of which may be wrong with half the level
    sides = [replace(clause, op=op) for op in ("<=", ">=")]
    halves = [_Side(side, sla, level / 2, green, clock_bound).decision() for side in sides]
    verdict = merge([half.verdict for half in halves])
    return next(half for half in halves if half.verdict == verdict)


def by_bounds(
    bounds: tuple[float | None, float | None],
    clock: float,
    unit: str,
    known: str,
    *,
    strict: bool = False,
) -> ClauseDecision | None:
    """The decision by bounds, a lower and an upper one, of how far something is beyond what is
    allowed; None: they show nothing. ``clock``: largest error of the values; ``strict``: being at
    the limit breaks it.
    """
    low, high = bounds

    def breaks(excess: float) -> bool:
        return excess >= 0 if strict else excess > 0

    if low is not None and breaks(low - clock):
        return ClauseDecision(verdict="fail", detail=known)
    if high is not None and not breaks(high + clock):
        return ClauseDecision(verdict="pass", detail=known)
    if (low is not None and breaks(low)) or (high is not None and not breaks(high)):
        return ClauseDecision(verdict="inconclusive", detail=f"{known}; {_blurred(clock, unit)}")
    return None


def _quantile(clause: Clause) -> float | None:
    return 0.5 if clause.aggregate == "median" else QUANTILES.get(clause.aggregate)


def _no_bound(n: int, fewest: int) -> str:
    return f"not a bound: {n} arm{'s' if n != 1 else ''} of at least {fewest}"


def _blurred(clock: float, unit: str) -> str:
    return (
        f"clocks of several machines blur it by {quantity(clock, unit)}, and more repeats do not"
        " help"
    )


def _confidence(level: float) -> str:
    """Of a level, rounded down: ``95 %``, ``99.3 %``."""
    return f"{math.floor((1 - level) * 1000 + 1e-9) / 10:g} %"


@dataclass(frozen=True)
class _Side:
    """A clause turned so that less is better: for ``>`` values are negated, and non-recovery stays
    the worst value. ``red``, ``green``: how often chance alone may fail or pass it.
    """

    clause: Clause
    sla: SlaResult
    red: float
    green: float
    clock: float

    @property
    def sign(self) -> int:
        return 1 if self.clause.op.startswith("<") else -1

    @property
    def strict(self) -> bool:
        return self.clause.op in ("<", ">")

    def excess(self, value: float) -> float:
        """How far a turned value is beyond the limit."""
        return value - self.sign * self.clause.limit

    def breaks(self, value: float) -> bool:
        return self.excess(value) >= 0 if self.strict else self.excess(value) > 0

    def shown(self, value: float, round_to: str = "lower") -> str:
        """A turned value as it was measured. ``round_to``: the direction that keeps a bound valid,
        "higher" for a lower bound.
        """
        if self.sign < 0:
            round_to = "lower" if round_to == "higher" else "higher"
        return quantity(abs(value) if math.isinf(value) else self.sign * value, self.unit, round_to)

    @property
    def unit(self) -> str:
        return self.clause.unit

    def decision(self) -> ClauseDecision:
        turned = [math.inf if math.isinf(v) else self.sign * v for v in self.sla.values]
        quantile, aggregate = _quantile(self.clause), self.clause.aggregate
        if quantile is not None:
            return self._by_quantile(turned, quantile if self.sign > 0 else 1 - quantile)
        if aggregate == "mean":
            return self._by_mean(turned)
        if aggregate == ("min" if self.sign > 0 else "max"):
            return self._by_any(turned)
        return self._by_each(per_arm(turned, self.sla.arms, max))

    def _by_quantile(self, turned: Sequence[float], share: float) -> ClauseDecision:
        of_arm = statistics.median if share == 0.5 else lambda values: percentile(values, share)
        values = per_arm(turned, self.sla.arms, of_arm)
        n, fewest = len(values), values_to_bound(share, self.green)
        low, high = quantile_bounds(values, share, self.red, self.green)
        least, most = ("at least", "at most") if self.sign > 0 else ("at most", "at least")
        parts = []
        if low is not None:
            said = f"{self.shown(low, 'higher')} with {_confidence(self.red)} confidence"
            parts.append(f"{least} {said}")
        if high is not None:
            parts.append(f"{most} {self.shown(high)} with {_confidence(self.green)}")
        known = self.clause.aggregate
        known += f" {', '.join(parts)}, n={counted(n, self.sla.of_arms)}" if parts else ""
        if high is None:
            known += f"{',' if parts else ':'} {_no_bound(n, fewest)}"
        least_by, most_by = (None if end is None else self.excess(end) for end in (low, high))
        bounds = (least_by, most_by)
        settled = by_bounds(bounds, self.clock, self.unit, known, strict=self.strict)
        if settled is not None:
            return settled
        broken = sum(map(self.breaks, values))
        if high is None and not broken:
            return ClauseDecision(verdict="inconclusive", detail=known, needed=fewest, surely=True)
        needed = values_to_settle(broken, n, share, self.red, self.green)
        if needed is None:
            known += (
                "; no reasonable number of repeats would settle it: the limit lies too near to what"
                " is measured"
            )
        return ClauseDecision(verdict="inconclusive", detail=known, needed=needed)

    def _by_each(self, values: Sequence[float]) -> ClauseDecision:
        n, worst = len(values), self.shown(max(values))
        broken = sum(self.breaks(value - self.clock) for value in values)
        if broken:
            said = f"{broken} of {n} break it, the worst is {worst}"
            return ClauseDecision(verdict="fail", detail=said)
        if any(self.breaks(value + self.clock) for value in values):
            said = f"the worst is {worst}, n={counted(n, self.sla.of_arms)}"
            blurred = f"{said}; {_blurred(self.clock, self.unit)}"
            return ClauseDecision(verdict="inconclusive", detail=blurred)
        fewest = values_to_predict(self.green)
        known = (
            f"none of {n} breaks it, the worst is {worst}; the next is beyond all of these with a"
            f" chance of at most {math.ceil(next_beyond(n) * 1000 - 1e-9) / 10:g} %"
        )
        if n >= fewest:
            return ClauseDecision(verdict="pass", detail=known)
        known += f", {_no_bound(n, fewest)}"
        return ClauseDecision(verdict="inconclusive", detail=known, needed=fewest, surely=True)

    def _by_any(self, values: Sequence[float]) -> ClauseDecision:
        if any(not self.breaks(value + self.clock) for value in values):
            return ClauseDecision(verdict="pass", detail=f"a value meets it, n={self.sla.counted}")
        said = (
            f"none of {len(values)} values meets it, which does not show that none would; say"
            " 'all' or 'median'"
        )
        return ClauseDecision(verdict="inconclusive", detail=said)

    def _by_mean(self, values: Sequence[float]) -> ClauseDecision:
        if lost := sum(map(math.isinf, values)):
            said = f"{lost} of {len(values)} never recovered: the mean is infinite"
            return ClauseDecision(verdict="fail", detail=said)
        said = (
            "a mean has no bound without an assumption about its distribution,"
            f" n={self.sla.counted}; say 'median'"
        )
        return ClauseDecision(verdict="inconclusive", detail=said)
