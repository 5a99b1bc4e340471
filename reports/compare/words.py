"""Sentences that state the findings for decision makers; each number carries its exact value."""

from __future__ import annotations

import math
from collections import Counter

from markupsafe import Markup

from trainchaos.chaos.units import MISSING, NEVER, enclosing, listed, number, plural, quantity
from trainchaos.harness.compare.result.statistics import EVERY
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.measure import METRICS
from trainchaos.reports.compare.facts import OUTCOMES, ComparisonFacts
from trainchaos.reports.content.figures import few

COST_UNIT = METRICS["failure_cost"].unit
"""Unit of a failure's cost: each rank has one GPU if there are any, so the price of a GPU hour
applies to a rank-hour.
"""


def exact(value: float | None, text: str) -> Markup:
    """``<data value>``: the text shown, with the value it was rounded from."""
    if value is None or math.isnan(value):
        return Markup(MISSING)
    machine = ("Infinity" if value > 0 else "-Infinity") if math.isinf(value) else repr(value)
    return Markup('<data value="{}">{}</data>').format(machine, text)


def figure(
    value: float | None, unit: str = "", better: str = "neither", finest: float = 0.0
) -> Markup:
    """A number rounded by the column's rule, with its unit if it has one."""
    text = number(value, better, finest) if finest else quantity(value, unit, better)
    shown = text if unit in ("", "ratio", "1") or text in (MISSING, NEVER) else f"{text} {unit}"
    return exact(value, shown)


def median(metric: Metric | None, unit: bool = False) -> Markup:
    """The median of a metric, rounded against its stack; ``unit``: with its unit. It says how many
    trials gave a value if not all did.
    """
    if metric is None:
        return Markup(MISSING)
    if unit:
        return figure(metric.median, metric.unit, metric.better) + few(metric)
    return exact(metric.median, quantity(metric.median, metric.unit, metric.better)) + few(metric)


def interval(bounds: tuple[float, float] | None) -> Markup:
    """``[low, high]``; empty if there is none, or if both ends are infinite."""
    if bounds is None or math.isinf(bounds[0]):
        return Markup("")
    return Markup("[{}, {}]").format(*map(exact, bounds, enclosing(*bounds)))


def findings(facts: ComparisonFacts) -> list[Markup]:
    """The headline about survival, followed by sentences about speed, cost and uncertainty."""
    if facts.reference not in facts.labels:
        ran = (
            f"{plural(len(facts.labels), 'other stack')} did"
            if facts.labels
            else "nor did any other stack"
        )
        return [Markup("{} did not run; {}.").format(facts.reference, ran)]
    lines = [
        _survival(facts),
        _speed(facts),
        _alike(facts),
        _behind(facts),
        _cost(facts),
        _certainty(facts),
    ]
    lines += [_apart(facts), _division(facts)]
    return [line for line in lines if line]


def _survival(facts: ComparisonFacts) -> Markup:
    name, kept, tried = facts.reference, facts.kept(facts.reference), facts.tried(facts.reference)
    lead = Markup("{} kept the job’s work through {} of {}").format(
        name, kept, plural(tried, "kind") + " of fault"
    )
    if not facts.others:
        return lead + Markup(".")
    best = max(facts.kept(x) for x in facts.others)
    who = [x for x in facts.others if facts.kept(x) == best]
    shown = listed(who) if len(who) <= 2 else f"{who[0]} and {len(who) - 1} more"
    fewer = len(who) == 1 and facts.tried(who[0]) != tried
    count = f"{best} of {facts.tried(who[0])}" if fewer else str(best)
    if best > kept:
        return lead + Markup("; {} through {}: more than it.").format(shown, count)
    if best == kept:
        return lead + Markup(", and so did {}." if best else "; no other did better.").format(shown)
    if best == 0:
        return lead + Markup("; no other stack through any.")
    return lead + Markup("; the best of the others, {}, through {}.").format(shown, count)


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


def _multiple(facts: ComparisonFacts, label: str, family: str, times: float) -> Markup:
    """``1.82 times [1.08, 2.53] as long``."""
    better = "higher" if times > 1 else "lower"
    ratio = facts.ratio(label, family)
    bounds = interval(ratio.interval) if ratio is not None else Markup("")
    said = exact(times, number(times, better))
    return Markup("{} times {}as long").format(said, bounds + " " if bounds else "")


def _speed(facts: ComparisonFacts) -> Markup:
    """Stacks shown to be slower, and those that only were slower in these trials, in separate
    sentences.
    """
    shown: list[Markup] = []
    open_: list[Markup] = []
    for family in facts.counted:
        other = facts.fastest_other(family)
        found = _times(facts, other[0], family) if other else None
        if other is None or found is None or found[0] <= 1:
            continue
        part = Markup("{} from {} ({})").format(
            _multiple(facts, other[0], family, found[0]), family, other[0]
        )
        (shown if found[1] else open_).append(part)
    line = Markup("")
    if shown:
        line += Markup("The fastest other stack takes longer to recover: {}.").format(
            Markup(", ").join(shown)
        )
    if open_:
        lead = (
            "Longer too, but not shown"
            if shown
            else "The fastest other stack took longer, which is not shown"
        )
        line += Markup("{}{} to be more than chance: {}.").format(
            " " if shown else "", lead, Markup(", ").join(open_)
        )
    return line


def _alike(facts: ComparisonFacts) -> Markup:
    """Stacks compared with a built-in other than the reference, because they continue in the same
    way.
    """
    parts = []
    for label in facts.others:
        known = facts.against(label)
        if known == facts.reference:
            continue
        for family in facts.counted:
            mine, theirs = facts.recovery(known, family), facts.recovery(label, family)
            if not mine or theirs is None or not math.isfinite(mine):
                continue
            says = Markup("never recovers")
            if (found := _times(facts, label, family)) is not None:
                chance = "" if found[1] else ", which may be chance"
                says = Markup("takes {}{}").format(
                    _multiple(facts, label, family, found[0]), chance
                )
            parts.append(
                Markup("from {}, {} {} (set against {})").format(family, label, says, known)
            )
    return (
        Markup("Like against like: {}.").format(Markup("; ").join(parts)) if parts else Markup("")
    )


def _apart(facts: ComparisonFacts) -> Markup:
    if not facts.apart:
        return Markup("")
    return Markup(
        "{} {} what a training script checks, not how a stack recovers: shown apart, not counted."
    ).format(listed(facts.apart), "tests" if len(facts.apart) == 1 else "test")


def _division(facts: ComparisonFacts) -> Markup:
    if facts.comparison.division == "closed":
        return Markup(
            "Closed division: every rule of docs/benchmark-rules.md that a program can hold was"
            " kept."
        )
    if facts.comparison.broken:
        return Markup("Not of the closed division: {}.").format("; ".join(facts.comparison.broken))
    return Markup("")


def _behind(facts: ComparisonFacts) -> Markup:
    """Where other stacks are better, given the same prominence."""
    parts = []
    for family in facts.counted:
        other = facts.fastest_other(family)
        found = _times(facts, other[0], family) if other else None
        if other is not None and found is not None and found[0] < 1:
            share = exact(found[0], number(found[0], "lower"))
            chance = "" if found[1] else ", which may be chance"
            parts.append(
                Markup("{} recovers from {} in {} of its time{}").format(
                    other[0], family, share, chance
                )
            )
    for family in facts.counted:
        mine = facts.cell(facts.reference, family)
        if mine is None or not OUTCOMES[mine.worst].tried:
            continue
        if OUTCOMES[mine.worst].kept:
            untouched = [
                x for x in facts.others if mine.worst != "masked" and _masked(facts, x, family)
            ]
            if untouched:
                parts.append(Markup("{} stops {} not at all").format(family, listed(untouched)))
            continue
        who = [x for x in facts.others if (c := facts.cell(x, family)) and OUTCOMES[c.worst].kept]
        if who:
            verb = "keeps" if len(who) == 1 else "keep"
            parts.append(
                Markup("{} {} the work through {}, it does not").format(listed(who), verb, family)
            )
    cheaper = sorted((o, x) for x in facts.others if (o := facts.overhead(x)) is not None)
    own = facts.overhead(facts.reference)
    if cheaper and own is not None and cheaper[0][0] < own:
        parts.append(
            Markup("without a fault, a step of {} costs {} times the bare one, its own {}").format(
                cheaper[0][1], figure(cheaper[0][0]), figure(own, better="lower")
            )
        )
    return (
        Markup("Where others are better: {}.").format(Markup("; ").join(parts))
        if parts
        else Markup("")
    )


def _masked(facts: ComparisonFacts, label: str, family: str) -> bool:
    cell = facts.cell(label, family)
    return cell is not None and cell.worst == "masked"


def _cost(facts: ComparisonFacts) -> Markup:
    for family in facts.counted:
        mine, other = facts.cell(facts.reference, family), facts.fastest_other(family)
        theirs = facts.cell(other[0], family) if other else None
        if mine is None or theirs is None or other is None:
            continue
        a, b = facts.money(mine.cost_gpu_hours), facts.money(theirs.cost_gpu_hours)
        if a is None or b is None or not math.isfinite(a):
            continue
        return Markup(
            "A thousand failures of the kind {} cost {} {} of GPU time, with {} {}."
        ).format(
            family,
            figure(a * 1000, better="lower"),
            facts.comparison.currency,
            other[0],
            figure(b * 1000),
        )
    return Markup("")


def _certainty(facts: ComparisonFacts) -> Markup:
    known = [
        r for r in facts.comparison.ratios if r.metric == "recovery" and r.label in facts.others
    ]
    says = Counter(r.says for r in known if r.family != EVERY)
    together = Counter(r.says for r in known if r.family == EVERY)
    total, open_ = says.total(), says["too few"] + says["no difference shown"]
    if not total:
        return Markup(
            "Nothing was paired with it, so no difference is shown to be more than chance."
        )
    if says["too few"] == total:
        line = Markup("With fewer than 6 pairs a cell none of this is shown at 95 % confidence.")
    else:
        neither = says["neither recovers"]
        line = Markup(
            "Of {} paired comparisons of recovery, {} show a difference at 95 % confidence, {}"
            " do not"
        ).format(total, total - open_ - neither, open_)
        line += Markup("; in {} neither recovers.").format(neither) if neither else Markup(".")
    if together:
        slower = together["slower"] + together["only the other recovers"]
        faster = together["faster"] + together["only this one recovers"]
        line += Markup(
            " Over every kind of fault together {} of the {} others are shown to be slower, {}"
            " faster."
        ).format(slower, together.total(), faster)
    return line
