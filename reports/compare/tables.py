"""The tables of a comparison; each cell carries its sort key."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from trainchaos.harness.compare.result.model import CellSummary
from trainchaos.harness.compare.result.statistics import EVERY
from trainchaos.harness.judge.incident import PHASE_NAMES
from trainchaos.reports.compare.facts import OUTCOMES, ComparisonFacts
from trainchaos.reports.compare.table import (
    FINEST_S,
    Column,
    Table,
    TableCell,
    count,
    middle,
    outcome,
    sort_key,
    table,
    text,
)
from trainchaos.reports.compare.words import COST_UNIT, exact, figure, interval, median
from trainchaos.reports.content.figures import MISSING, enclosing, plural


def scorecard(facts: ComparisonFacts, families: Sequence[str]) -> Table:
    """Stack by fault family: outcome of the job, recovery time, losses."""
    columns = [
        Column(name="stack"),
        *(Column(name=family, kind="score") for family in families),
        Column(name="step without a fault", unit="times the bare one", kind="number"),
    ]
    rows = []
    for label in facts.labels:
        cells = [_score(facts, label, family) for family in families]
        rows.append([_stack(facts, label), *cells, middle(facts.slowest_step(label))])
    return table("Scorecard: stacks by kind of fault", columns, rows)


def _stack(facts: ComparisonFacts, label: str) -> TableCell:
    known = facts.stacks.get(label)
    kept = f"{facts.kept(label)} of {facts.tried(label)} kept"
    ours = (
        Markup(' <small class="own">this project</small>')
        if known is not None and known.ours
        else Markup("")
    )
    content = Markup('<b>{}</b>{}<span class="quiet under">{}</span>').format(label, ours, kept)
    return TableCell(content=content, key=label)


def _score(facts: ComparisonFacts, label: str, family: str) -> TableCell:
    cell = facts.cell(label, family)
    if cell is None:
        return TableCell(content=Markup('<span class="quiet">did not run</span>'))
    if not OUTCOMES[cell.worst].tried:
        note = Markup('<span class="quiet under">{}</span>').format(cell.note or cell.witness)
        return TableCell(content=outcome(cell.worst) + note)
    lines = [outcome(cell.worst, _counts(cell)), _time(cell), _whole(cell), _losses(cell)]
    said = facts.ahead(label, family)
    if said:
        lines.append(Markup('<span class="ahead">{}</span>').format(said))
    recovery = cell.recovery.median if cell.recovery is not None else None
    key = math.inf if not OUTCOMES[cell.worst].kept and recovery is None else recovery
    return TableCell(
        content=Markup("").join(lines),
        key=sort_key(0.0 if cell.worst == "masked" and key is None else key),
    )


def _counts(cell: CellSummary) -> str:
    """``2 of 3`` where outcomes differ, else the number of trials."""
    return (
        f"{cell.outcomes.get(cell.worst, 0)} of {cell.n}"
        if len(cell.outcomes) > 1
        else f"n = {cell.n}"
    )


def _time(cell: CellSummary) -> Markup:
    if cell.recovery is None or cell.recovery.median is None:
        word = "nothing to recover from" if cell.worst == "masked" else "no time measured"
        return Markup('<span class="quiet under">{}</span>').format(word)
    never = " never" if math.isinf(cell.recovery.median) else ""
    return Markup('<span class="time{}">{} <small class="quiet">{}</small></span>').format(
        never, median(cell.recovery, unit=True), interval(cell.recovery.ci95)
    )


def _whole(cell: CellSummary) -> Markup:
    """Times to full rate and redundancy, in the words of a run's reports."""
    known = (("full rate", cell.full_rate), ("redundant", cell.redundancy))
    parts = [
        Markup("{} {}").format(name, median(metric, unit=True))
        for name, metric in known
        if metric is not None
    ]
    return (
        Markup('<span class="quiet under">{}</span>').format(Markup(" · ").join(parts))
        if parts
        else Markup("")
    )


def _losses(cell: CellSummary) -> Markup:
    known = cell.samples_lost is not None and cell.samples_lost.median is not None
    lost = Markup("{} lost").format(median(cell.samples_lost)) if known else Markup("lost unknown")
    return Markup('<span class="quiet under">goodput {} · {}</span>').format(
        median(cell.goodput), lost
    )


def ratios(facts: ComparisonFacts) -> Table:
    """Each stack's recovery time divided by that of the stack it is compared with, by pairs of the
    same seed.
    """
    pooled = any(ratio.family == EVERY for ratio in facts.comparison.ratios)
    families = [EVERY, *facts.families] if pooled else facts.families
    columns = [Column(name="stack"), *(Column(name=family, kind="score") for family in families)]
    rows = [
        [text(label), *(_ratio(facts, label, family) for family in families)]
        for label in facts.labels
        if label != facts.reference
    ]
    return table(
        "Recovery time as a multiple of that of the stack it is compared with", columns, rows
    )


def _ratio(facts: ComparisonFacts, label: str, family: str) -> TableCell:
    ratio = facts.ratio(label, family)
    if ratio is None:
        against = facts.against(label)
        mine = facts.cell(against, family)
        still = mine is not None and mine.worst == "masked"
        why = f"{against} did not stop" if still else "no pair of times"
        return TableCell(content=Markup('<span class="quiet">{}</span>').format(why))
    better = "higher" if (ratio.value or 0) > 1 else "lower"
    shown = Markup('<span class="time">{}{} <small class="quiet">{}</small></span>').format(
        figure(ratio.value, better=better),
        "×" if ratio.value is not None and math.isfinite(ratio.value) else "",
        interval(ratio.interval),
    )
    guess = "at least" if ratio.says == "too few" else "about"
    more = f", {guess} {ratio.needed} would settle it" if ratio.needed else ""
    ahead = ratio.says in ("faster", "only this one recovers")
    said = Markup('<span class="ahead">{}</span>').format(ratio.says) if ahead else Markup("")
    rest = (
        f"{plural(ratio.n, 'pair')}{more}"
        if ahead
        else f"{ratio.says}, {plural(ratio.n, 'pair')}{more}"
    )
    rest += f" with {ratio.against}" if ratio.against != facts.reference else ""
    content = shown + said + Markup('<span class="quiet under">{}</span>').format(rest)
    return TableCell(content=content, key=sort_key(ratio.value))


def phases(facts: ComparisonFacts, family: str) -> Table:
    """Median seconds of each phase under one family."""
    found = {
        label: c.phases for label in facts.labels if (c := facts.cell(label, family)) and c.phases
    }
    names = [p for p in PHASE_NAMES if any(p in x for x in found.values())]
    names += sorted({p for x in found.values() for p in x} - set(names))
    columns = [
        Column(name="stack"),
        *(Column(name=name, unit="s", kind="number") for name in names),
    ]
    columns.append(Column(name="n", kind="number"))
    rows = [
        [
            text(label),
            *(count(x.get(n), "", "lower", FINEST_S) for n in names),
            text(facts.phased(label, family)),
        ]
        for label, x in found.items()
    ]
    return table(f"Median seconds of each phase: {family}", columns, rows)


def goodput(facts: ComparisonFacts) -> Table:
    """Goodput with the fault, and of the control without it."""
    columns = [
        Column(name="stack"),
        *(Column(name=family, kind="score") for family in facts.families),
    ]
    rows = [
        [text(label), *(_goodput(facts, label, f) for f in facts.families)]
        for label in facts.labels
    ]
    return table("Goodput by kind of fault", columns, rows)


def _goodput(facts: ComparisonFacts, label: str, family: str) -> TableCell:
    cell = facts.cell(label, family)
    if cell is None or cell.goodput is None:
        return TableCell(content=Markup(MISSING))
    controls = [
        t.control_goodput for t in facts.trials(label, family) if t.control_goodput is not None
    ]
    without = Markup("")
    if controls:
        low, high = min(controls), max(controls)
        ends = map(exact, (low, high), enclosing(low, high))
        shown = figure(low, better="higher") if low == high else Markup("{} to {}").format(*ends)
        without = Markup('<span class="quiet under">without the fault {}</span>').format(shown)
    content = Markup('<span class="time">{} <small class="quiet">{}</small></span>{}{}').format(
        median(cell.goodput),
        interval(cell.goodput.ci95),
        without,
        _goodput_ratio(facts, label, family),
    )
    return TableCell(content=content, key=sort_key(cell.goodput.median))


def _goodput_ratio(facts: ComparisonFacts, label: str, family: str) -> Markup:
    ratio = facts.ratio(label, family, "goodput")
    if ratio is None or ratio.value is None:
        return Markup("")
    words = {"faster": "more", "slower": "less", "too few": "too few pairs to say"}.get(
        ratio.says, ratio.says
    )
    return Markup('<span class="{}">{}× {}’s: {}</span>').format(
        "ahead" if ratio.says == "faster" else "quiet under",
        figure(ratio.value, better="higher"),
        ratio.against,
        words,
    )


def cost(facts: ComparisonFacts) -> Table:
    """Rank-hours, and money, that one failure costs."""
    columns = [
        Column(name="stack"),
        *(Column(name=family, kind="score") for family in facts.families),
    ]
    rows = [
        [text(label), *(_cost(facts, label, f) for f in facts.families)] for label in facts.labels
    ]
    return table("Cost of one failure", columns, rows)


def _cost(facts: ComparisonFacts, label: str, family: str) -> TableCell:
    cell = facts.cell(label, family)
    hours = cell.cost_gpu_hours if cell is not None else None
    if hours is None:
        return TableCell(content=Markup(MISSING))
    if math.isinf(hours):
        return TableCell(
            content=Markup('<span class="time never">{}</span>').format(exact(hours, "no end")),
            key=sort_key(hours),
        )
    money = facts.money(hours)
    lines = Markup('<span class="time">{}</span>').format(
        figure(hours, COST_UNIT, "lower")
        if money is None
        else figure(money, facts.comparison.currency, "lower")
    )
    if money is not None:
        lines += Markup('<span class="quiet under">{}</span>').format(
            figure(hours, COST_UNIT, "lower")
        )
    return TableCell(content=lines, key=sort_key(hours))


def key_of_outcomes(facts: ComparisonFacts) -> list[tuple[Markup, str]]:
    """Shape, word and meaning of the outcomes on the page."""
    used = {trial.outcome for trial in facts.comparison.trials} | {
        cell.worst for cell in facts.comparison.cells
    }
    return [(outcome(name), known.meaning) for name, known in OUTCOMES.items() if name in used]
