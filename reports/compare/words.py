"""Sentences that state the findings for decision makers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from trainchaos.chaos.units import interval as interval_of
from trainchaos.chaos.units import listed, number, plural, quantity
from trainchaos.harness.compare.result.model import OUTCOMES
from trainchaos.harness.compare.result.statistics import EVERY
from trainchaos.harness.judge.measure.measure import METRICS
from trainchaos.reports.compare.facts import ComparisonFacts

COST_UNIT = METRICS["failure_cost"].unit
"""Unit of a failure's cost: each rank has one GPU if there are any, so the price of a GPU hour
applies to a rank-hour.
"""


def interval(bounds: tuple[float, float] | None) -> str:
    """``[low, high]``; empty if there is none, or if both ends are infinite."""
    return "" if bounds is None or math.isinf(bounds[0]) else interval_of(bounds)


def findings(facts: ComparisonFacts) -> list[str]:
    """The headline about survival, followed by sentences about speed, cost and uncertainty."""
    if facts.reference not in facts.labels:
        ran = f"{plural(len(facts.labels), 'other stack')} did"
        return [f"{facts.reference} did not run; {ran if facts.labels else 'nor did any other'}."]
    lines = [_survival(facts), " ".join(_speed(facts)), _alike(facts), _behind(facts), _cost(facts)]
    return [line for line in (*lines, _certainty(facts), *_bounds(facts)) if line]


def _survival(facts: ComparisonFacts) -> str:
    name, kept, tried = facts.reference, facts.kept(facts.reference), facts.tried(facts.reference)
    lead = f"{name} kept the job’s work through {kept} of {plural(tried, 'kind')} of fault"
    if not facts.others:
        return f"{lead}."
    best = max(facts.kept(x) for x in facts.others)
    who = [x for x in facts.others if facts.kept(x) == best]
    shown = listed(who) if len(who) <= 2 else f"{who[0]} and {len(who) - 1} more"
    fewer = len(who) == 1 and facts.tried(who[0]) != tried
    count = f"{best} of {facts.tried(who[0])}" if fewer else str(best)
    if best > kept:
        return f"{lead}; {shown} through {count}: more than it."
    if best == kept:
        return f"{lead}, and so did {shown}." if best else f"{lead}; no other did better."
    if best == 0:
        return f"{lead}; no other stack through any."
    return f"{lead}; the best of the others, {shown}, through {count}."


def _times(facts: ComparisonFacts, label: str, family: str) -> tuple[float, bool] | None:
    """A stack's recovery time over that of the stack it is compared with, and whether the
    difference is shown; None if one of them never recovers. With pairs it is the paired ratio,
    never that of the medians, which may differ; without pairs no difference counts as shown.
    """
    mine, theirs = facts.recovery(facts.against(label), family), facts.recovery(label, family)
    if not mine or theirs is None or not (math.isfinite(mine) and math.isfinite(theirs)):
        return None
    ratio = facts.ratio(label, family)
    if ratio is None or ratio.value is None or not math.isfinite(ratio.value):
        return theirs / mine, False
    return ratio.value, ratio.says in ("slower", "faster")


def _multiple(facts: ComparisonFacts, label: str, family: str, times: float) -> str:
    """``1.82 times [1.08, 2.53] as long``."""
    ratio = facts.ratio(label, family)
    bounds = interval(ratio.interval) if ratio is not None else ""
    parts = (number(times, "higher" if times > 1 else "lower"), "times", bounds, "as long")
    return " ".join(filter(None, parts))


def _fastest(facts: ComparisonFacts) -> Iterator[tuple[str, str, float, bool]]:
    """Of each kind of fault, the fastest other stack: family, label, multiple, whether shown."""
    for family in facts.counted:
        other = facts.fastest_other(family)
        ratio = _times(facts, other[0], family) if other else None
        if other is not None and ratio is not None:
            yield family, other[0], *ratio


def _speed(facts: ComparisonFacts) -> list[str]:
    """Stacks shown to be slower, and those that only were slower in these trials."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    for family, label, times, shown in _fastest(facts):
        if times > 1:
            said = f"{_multiple(facts, label, family, times)} from {family} ({label})"
            parts[shown].append(said)
    lines = []
    if parts[True]:
        lines.append(f"The fastest other stack takes longer to recover: {', '.join(parts[True])}.")
    if parts[False]:
        lead = "The fastest other stack took longer, which is not shown"
        lead = "Longer too, but not shown" if parts[True] else lead
        lines.append(f"{lead} to be more than chance: {', '.join(parts[False])}.")
    return lines


def _alike(facts: ComparisonFacts) -> str:
    """Stacks compared with a built-in other than the reference, because they continue in the same
    way.
    """
    parts = []
    for label in (x for x in facts.others if facts.against(x) != facts.reference):
        known = facts.against(label)
        for family in facts.counted:
            mine, theirs = facts.recovery(known, family), facts.recovery(label, family)
            if not mine or theirs is None or not math.isfinite(mine):
                continue
            says = "never recovers"
            if (ratio := _times(facts, label, family)) is not None:
                says = f"takes {_multiple(facts, label, family, ratio[0])}"
                says += "" if ratio[1] else ", which may be chance"
            parts.append(f"from {family}, {label} {says} (set against {known})")
    return f"Like against like: {'; '.join(parts)}." if parts else ""


def _behind(facts: ComparisonFacts) -> str:
    """Where other stacks are better, given the same prominence."""
    parts = []
    for family, label, times, shown in _fastest(facts):
        if times < 1:
            chance = "" if shown else ", which may be chance"
            share = number(times, "lower")
            parts.append(f"{label} recovers from {family} in {share} of its time{chance}")
    for family in facts.counted:
        mine = facts.cell(facts.reference, family)
        cells = {x: cell for x in facts.others if (cell := facts.cell(x, family)) is not None}
        if mine is None or not OUTCOMES[mine.worst].tried:
            continue
        masked = [x for x, cell in cells.items() if cell.worst == "masked"]
        kept = [x for x, cell in cells.items() if OUTCOMES[cell.worst].kept]
        if OUTCOMES[mine.worst].kept and mine.worst != "masked" and masked:
            parts.append(f"{family} stops {listed(masked)} not at all")
        elif not OUTCOMES[mine.worst].kept and kept:
            verb = "keeps" if len(kept) == 1 else "keep"
            parts.append(f"{listed(kept)} {verb} the work through {family}, it does not")
    steps = sorted((o, x) for x in facts.others if (o := facts.overhead(x)) is not None)
    own = facts.overhead(facts.reference)
    if steps and own is not None and steps[0][0] < own:
        parts.append(
            f"without a fault, a step of {steps[0][1]} costs {number(steps[0][0])} times the bare"
            f" one, its own {number(own, 'lower')}"
        )
    return f"Where others are better: {'; '.join(parts)}." if parts else ""


def _cost(facts: ComparisonFacts) -> str:
    currency = facts.comparison.currency
    for family in facts.counted:
        other = facts.fastest_other(family)
        if other is None:
            continue
        costs = []
        for label in (facts.reference, other[0]):
            cell = facts.cell(label, family)
            costs.append(facts.money(cell.cost_gpu_hours if cell else None))
        mine, theirs = costs
        if mine is not None and theirs is not None and math.isfinite(mine):
            return (
                f"A thousand failures of the kind {family} cost {number(mine * 1000, 'lower')}"
                f" {currency} of GPU time, with {other[0]} {quantity(theirs * 1000, currency)}."
            )
    return ""


def _certainty(facts: ComparisonFacts) -> str:
    known = [
        r for r in facts.comparison.ratios if r.metric == "recovery" and r.label in facts.others
    ]
    says = Counter(r.says for r in known if r.family != EVERY)
    together = Counter(r.says for r in known if r.family == EVERY)
    total, unsettled = says.total(), says["too few"] + says["no difference shown"]
    if not total:
        return "Nothing was paired with it, so no difference is shown to be more than chance."
    neither = says["neither recovers"]
    line = (
        f"Of {total} paired comparisons of recovery, {total - unsettled - neither} show a"
        f" difference at 95 % confidence, {unsettled} do not"
        f"{f'; in {neither} neither recovers' if neither else ''}."
    )
    if says["too few"] == total:
        line = "With fewer than 6 pairs a cell none of this is shown at 95 % confidence."
    if together:
        slower = together["slower"] + together["only the other recovers"]
        faster = together["faster"] + together["only this one recovers"]
        line += (
            f" Over every kind of fault together {slower} of the {together.total()} others are"
            f" shown to be slower, {faster} faster."
        )
    return line


def _bounds(facts: ComparisonFacts) -> Iterator[str]:
    """What is shown apart, and which division it is."""
    if facts.apart:
        verb = "tests" if len(facts.apart) == 1 else "test"
        yield (
            f"{listed(facts.apart)} {verb} what a training script checks, not how a stack recovers:"
            " shown apart, not counted."
        )
    if facts.comparison.division == "closed":
        yield (
            "Closed division: every rule of docs/benchmark-rules.md that a program can hold was"
            " kept."
        )
    elif facts.comparison.broken:
        yield f"Not of the closed division: {'; '.join(facts.comparison.broken)}."
