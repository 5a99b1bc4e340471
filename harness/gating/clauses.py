"""What a run shows about an SLA clause with confidence: the bound of its aggregate against its limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chaos.sla import QUANTILES, Clause, parse_clause
from harness.gating.bounds import LEVEL, quantile_bounds, values_to_settle
from harness.judging.gates import quantity
from harness.results import SlaResult, Verdict, merge


@dataclass(frozen=True, kw_only=True)
class Decision:
    """``needed``: values in all after which it would be settled; None: it is, or more would not help."""

    verdict: Verdict
    detail: str
    needed: int | None = None


def is_statistical(sla: SlaResult) -> bool:
    """Whether chance can break a clause that holds: it has a quantile. One counterexample breaks the others for
    sure."""
    return bool(sla.values) and _quantile(_parse(sla)) is not None


def decide(sla: SlaResult, level: float, *, clock_bound: float = 0.0) -> Decision:
    """Judge a clause by the bounds of its aggregate. ``level``: how often it may be called broken by chance alone;
    ``clock_bound``: how far each value may be from the truth, in the metric's unit.

    The median and p90 to p99 have order-statistic bounds. ``max <``, ``min >`` and ``all`` speak of each value: one
    that breaks the limit is proof. ``max >`` and ``min <`` can only be shown to hold. A mean has no bound without an
    assumption about its distribution (Bahadur and Savage 1956). Raises ClauseError for a clause that cannot be read.
    """
    if not sla.values:
        return Decision(verdict="inconclusive", detail=sla.detail)
    clause = _parse(sla)
    if clause.op != "==":
        return _one_sided(clause, sla.values, level, clock_bound)
    # equal: neither above nor below; either may be wrong with half the level
    halves = [_one_sided(replace(clause, op=op), sla.values, level / 2, clock_bound) for op in ("<=", ">=")]
    verdict = merge([half.verdict for half in halves])
    return next(half for half in halves if half.verdict == verdict)


def _parse(sla: SlaResult) -> Clause:
    return parse_clause(sla.clause, sla.unit)


def _quantile(clause: Clause) -> float | None:
    return 0.5 if clause.aggregate == "median" else QUANTILES.get(clause.aggregate)


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A clause seen so that less is better: values of ``>`` are negated, and non-recovery stays the worst there is."""

    sign: int
    limit: float
    strict: bool

    def turned(self, value: float) -> float:
        return math.inf if math.isinf(value) else self.sign * value

    def breaks(self, value: float) -> bool:
        return value >= self.limit if self.strict else value > self.limit


def _one_sided(clause: Clause, values: Sequence[float], level: float, clock: float) -> Decision:
    sign = 1 if clause.op.startswith("<") else -1
    side = _Side(sign=sign, limit=sign * clause.limit, strict=clause.op in ("<", ">"))
    turned = [side.turned(value) for value in values]
    quantile = _quantile(clause)
    if quantile is not None:
        return _by_quantile(clause, side, turned, quantile if sign > 0 else 1 - quantile, level, clock)
    if clause.aggregate == "mean":
        return _by_mean(turned)
    if clause.aggregate == ("min" if sign > 0 else "max"):
        return _by_any(side, turned, clock)
    return _by_each(clause, side, turned, clock)


def _by_quantile(
    clause: Clause, side: _Side, values: Sequence[float], quantile: float, level: float, clock: float
) -> Decision:
    low, high = quantile_bounds(values, quantile, level, LEVEL)
    unit, n = clause.unit, len(values)
    least, most = ("at least", "at most") if side.sign > 0 else ("at most", "at least")
    parts = []
    if low is not None:
        parts.append(f"{least} {_shown(side, low, unit, 'higher')} with {_percent(level)} confidence")
    if high is not None:
        parts.append(f"{most} {_shown(side, high, unit, 'lower')} with {_percent(LEVEL)}")
    known = f"{clause.aggregate} {', '.join(parts) or 'without a bound yet'}, n={n}"
    if low is not None and side.breaks(low - clock):
        return Decision(verdict="fail", detail=known)
    if high is not None and not side.breaks(high + clock):
        return Decision(verdict="pass", detail=known)
    settled = (low is not None and side.breaks(low)) or (high is not None and not side.breaks(high))
    if clock and settled:
        return Decision(verdict="inconclusive", detail=f"{known}; {_blurred(clock, unit)}")
    needed = values_to_settle(sum(map(side.breaks, values)), n, quantile, level)
    if needed is None:
        known += (
            "; no reasonable number of repeats would settle it: the limit lies too near to what is measured"
        )
    return Decision(verdict="inconclusive", detail=known, needed=needed)


def _by_each(clause: Clause, side: _Side, values: Sequence[float], clock: float) -> Decision:
    broken = sum(side.breaks(value - clock) for value in values)
    doubtful = sum(side.breaks(value + clock) for value in values)
    worst, n = _shown(side, max(values), clause.unit), len(values)
    if broken:
        return Decision(verdict="fail", detail=f"{broken} of {n} break it, the worst is {worst}")
    if doubtful:
        return Decision(
            verdict="inconclusive", detail=f"the worst is {worst}, n={n}; {_blurred(clock, clause.unit)}"
        )
    # Clopper and Pearson's bound for none in n
    share = 1 - LEVEL ** (1 / n)
    return Decision(
        verdict="pass",
        detail=f"none of {n} breaks it, the worst is {worst}; at most {share:.0%} of all would, with "
        f"{_percent(LEVEL)} confidence",
    )


def _by_any(side: _Side, values: Sequence[float], clock: float) -> Decision:
    if any(not side.breaks(value + clock) for value in values):
        return Decision(verdict="pass", detail=f"a value meets it, n={len(values)}")
    return Decision(
        verdict="inconclusive",
        detail=f"none of {len(values)} values meets it, which does not show that none would; say 'all' or 'median'",
    )


def _by_mean(values: Sequence[float]) -> Decision:
    if any(map(math.isinf, values)):
        lost = sum(map(math.isinf, values))
        return Decision(
            verdict="fail", detail=f"{lost} of {len(values)} never recovered: the mean is infinite"
        )
    return Decision(
        verdict="inconclusive",
        detail=f"a mean has no bound without an assumption about its distribution, n={len(values)}; say 'median'",
    )


def _shown(side: _Side, value: float, unit: str, round_to: str = "lower") -> str:
    """A value of the side as it was measured. ``round_to``: whose bound stays one, "higher" of a lower bound."""
    if side.sign < 0:
        round_to = "lower" if round_to == "higher" else "higher"
    return quantity(value if math.isinf(value) else side.sign * value, unit, round_to)


def _blurred(clock: float, unit: str) -> str:
    return f"clocks of several machines blur it by {quantity(clock, unit)}, and more repeats do not help"


def _percent(level: float) -> str:
    """The confidence of a level, never more than it is: ``95 %``, ``99.3 %``."""
    confidence = math.floor((1 - level) * 1000 + 1e-9) / 10
    return f"{confidence:g} %"
