"""What a run shows about an SLA clause with confidence: the bound of its aggregate against its
limit.

The unit is the arm. Values of one arm are correlated, so each arm counts once: with its own median
or quantile, or with its worst value if the clause is about every value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainchaos.chaos.scenario.sla import QUANTILES, Clause, parse_clause
from trainchaos.chaos.units import counted
from trainchaos.harness.gating.bounds import (
    LEVEL,
    next_beyond,
    quantile_bounds,
    quantile_ranks,
    values_to_predict,
    values_to_settle,
)
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
    return bool(sla.values) and _quantile(_parse(sla)) is not None


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
    clause = _parse(sla)
    if clause.op != "==":
        return _one_sided(clause, sla, _Levels(red=level, green=green), clock_bound)
    # equal means neither above nor below, each of which may be wrong with half the level
    levels = _Levels(red=level / 2, green=green)
    halves = [_one_sided(replace(clause, op=op), sla, levels, clock_bound) for op in ("<=", ">=")]
    verdict = merge([half.verdict for half in halves])
    return next(half for half in halves if half.verdict == verdict)


def _parse(sla: SlaResult) -> Clause:
    return parse_clause(sla.clause, sla.unit)


def _quantile(clause: Clause) -> float | None:
    return 0.5 if clause.aggregate == "median" else QUANTILES.get(clause.aggregate)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A clause turned so that less is better: for ``>`` values are negated, and non-recovery stays
    the worst value.
    """

    sign: int
    limit: float
    strict: bool

    def turned(self, value: float) -> float:
        return math.inf if math.isinf(value) else self.sign * value

    def breaks(self, value: float) -> bool:
        return value >= self.limit if self.strict else value > self.limit


@dataclass(frozen=True, kw_only=True)
class _Levels:
    """How often chance alone may fail (``red``) or pass (``green``) a clause."""

    red: float
    green: float


def _one_sided(clause: Clause, sla: SlaResult, levels: _Levels, clock: float) -> ClauseDecision:
    sign = 1 if clause.op.startswith("<") else -1
    side = _Side(sign=sign, limit=sign * clause.limit, strict=clause.op in ("<", ">"))
    turned = [side.turned(value) for value in sla.values]
    quantile = _quantile(clause)
    if quantile is not None:
        share = quantile if sign > 0 else 1 - quantile
        mine = per_arm(turned, sla.arms, statistics.median if quantile == 0.5 else _nearest(share))
        return _by_quantile(
            clause, side, mine, share, levels, clock, counted(len(mine), sla.of_arms)
        )
    if clause.aggregate == "mean":
        return _by_mean(turned, sla.counted)
    if clause.aggregate == ("min" if sign > 0 else "max"):
        return _by_any(side, turned, clock, sla.counted)
    each = per_arm(turned, sla.arms, max)
    return _by_each(clause, side, each, levels.green, clock, counted(len(each), sla.of_arms))


def _nearest(share: float) -> Callable[[Sequence[float]], float]:
    """An arm's own quantile, by the nearest rank."""
    return lambda values: sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def _by_quantile(
    clause: Clause,
    side: _Side,
    values: Sequence[float],
    quantile: float,
    levels: _Levels,
    clock: float,
    arms: str,
) -> ClauseDecision:
    low, high = quantile_bounds(values, quantile, levels.red, levels.green)
    unit, n = clause.unit, len(values)
    least, most = ("at least", "at most") if side.sign > 0 else ("at most", "at least")
    parts = []
    if low is not None:
        parts.append(
            f"{least} {_shown(side, low, unit, 'higher')} with {_percent(levels.red)} confidence"
        )
    if high is not None:
        parts.append(f"{most} {_shown(side, high, unit, 'lower')} with {_percent(levels.green)}")
    known = f"{clause.aggregate} {', '.join(parts)}, n={arms}" if parts else clause.aggregate
    if high is None:
        known += f"{':' if not parts else ','} {no_bound(n, _fewest(quantile, levels.green))}"
    if low is not None and side.breaks(low - clock):
        return ClauseDecision(verdict="fail", detail=known)
    if high is not None and not side.breaks(high + clock):
        return ClauseDecision(verdict="pass", detail=known)
    settled = (low is not None and side.breaks(low)) or (high is not None and not side.breaks(high))
    if clock and settled:
        return ClauseDecision(verdict="inconclusive", detail=f"{known}; {_blurred(clock, unit)}")
    broken = sum(map(side.breaks, values))
    if high is None and not broken:
        fewest = _fewest(quantile, levels.green)
        return ClauseDecision(verdict="inconclusive", detail=known, needed=fewest, surely=True)
    needed = values_to_settle(broken, n, quantile, levels.red, levels.green)
    if needed is None:
        known += (
            "; no reasonable number of repeats would settle it: the limit lies too near to what is"
            " measured"
        )
    return ClauseDecision(verdict="inconclusive", detail=known, needed=needed)


def no_bound(n: int, fewest: int) -> str:
    """Message that ``n`` arms give no bound, with the fewest that would."""
    return f"not a bound: {n} arm{'s' if n != 1 else ''} of at least {fewest}"


def _fewest(quantile: float, level: float) -> int:
    """Fewest arms for which a quantile has an upper bound."""
    return next(n for n in range(1, 10**6) if quantile_ranks(n, quantile, level, level)[1] <= n)


def _by_each(
    clause: Clause, side: _Side, values: Sequence[float], level: float, clock: float, arms: str
) -> ClauseDecision:
    broken = sum(side.breaks(value - clock) for value in values)
    doubtful = sum(side.breaks(value + clock) for value in values)
    worst, n = _shown(side, max(values), clause.unit), len(values)
    if broken:
        return ClauseDecision(
            verdict="fail", detail=f"{broken} of {n} break it, the worst is {worst}"
        )
    if doubtful:
        return ClauseDecision(
            verdict="inconclusive",
            detail=f"the worst is {worst}, n={arms}; {_blurred(clock, clause.unit)}",
        )
    chance, fewest = next_beyond(n), values_to_predict(level)
    known = (
        f"none of {n} breaks it, the worst is {worst}; the next is beyond all of these with a"
        f" chance of at most {math.ceil(chance * 1000 - 1e-9) / 10:g} %"
    )
    if n < fewest:
        return ClauseDecision(
            verdict="inconclusive",
            detail=f"{known}, {no_bound(n, fewest)}",
            needed=fewest,
            surely=True,
        )
    return ClauseDecision(verdict="pass", detail=known)


def _by_any(side: _Side, values: Sequence[float], clock: float, count: str) -> ClauseDecision:
    if any(not side.breaks(value + clock) for value in values):
        return ClauseDecision(verdict="pass", detail=f"a value meets it, n={count}")
    return ClauseDecision(
        verdict="inconclusive",
        detail=(
            f"none of {len(values)} values meets it, which does not show that none would; say 'all'"
            " or 'median'"
        ),
    )


def _by_mean(values: Sequence[float], count: str) -> ClauseDecision:
    if any(map(math.isinf, values)):
        lost = sum(map(math.isinf, values))
        return ClauseDecision(
            verdict="fail", detail=f"{lost} of {len(values)} never recovered: the mean is infinite"
        )
    return ClauseDecision(
        verdict="inconclusive",
        detail=(
            f"a mean has no bound without an assumption about its distribution, n={count}; say"
            " 'median'"
        ),
    )


def _shown(side: _Side, value: float, unit: str, round_to: str = "lower") -> str:
    """A turned value as it was measured. ``round_to``: the direction that keeps a bound valid,
    "higher" for a lower bound.
    """
    if side.sign < 0:
        round_to = "lower" if round_to == "higher" else "higher"
    return quantity(value if math.isinf(value) else side.sign * value, unit, round_to)


def _blurred(clock: float, unit: str) -> str:
    return (
        f"clocks of several machines blur it by {quantity(clock, unit)}, and more repeats do not"
        " help"
    )


def _percent(level: float) -> str:
    """The confidence of a level, rounded down: ``95 %``, ``99.3 %``."""
    confidence = math.floor((1 - level) * 1000 + 1e-9) / 10
    return f"{confidence:g} %"
