"""The tables of a comparison, for its page and its Markdown; each cell carries its sort key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from trainchaos.chaos.units import MISSING, number, pairs, percent, plural, with_unit
from trainchaos.chaos.units import interval as range_of
from trainchaos.harness.compare.result.model import (
    OUTCOMES,
    CellSummary,
    OutcomeClass,
    Ratio,
    Trial,
)
from trainchaos.harness.compare.result.statistics import EVERY
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.incident import PHASE_NAMES
from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.compare.words import COST_UNIT, interval
from trainchaos.reports.content.figures import alarms, median_of, survived
from trainchaos.reports.content.tables import (
    Cell,
    Column,
    Table,
    numeric,
    stacked,
    table,
    wide,
)

FINEST_S = 1e-4
OUTCOME_ORDER = {name: place for place, name in enumerate(OUTCOMES)}


def scorecard(facts: ComparisonFacts, families: Sequence[str]) -> Table:
    """Stack by fault family: outcome of the job, recovery time, losses."""
    rows = [
        [
            _stack(facts, label),
            *(_score(facts, label, family) for family in families),
            middle(facts.slowest_step(label)),
        ]
        for label in facts.labels
    ]
    columns = ["stack", *_scores(families), numeric("step without a fault", "times the bare one")]
    return table(columns, rows, name="Scorecard: stacks by kind of fault")


def _scores(families: Sequence[str]) -> list[Column]:
    return [Column(name=family, kind="score") for family in families]


def _stack(facts: ComparisonFacts, label: str) -> Cell:
    known = facts.stacks.get(label)
    ours = Markup(' <small class="own">this project</small>') if known and known.ours else ""
    content = Markup('<b>{}</b>{}<span class="quiet under">{} of {} kept</span>').format(
        label, ours, facts.kept(label), facts.tried(label)
    )
    return Cell(content=content, text=label, key=label)


def _score(facts: ComparisonFacts, label: str, family: str) -> Cell:
    cell = facts.cell(label, family)
    if cell is None:
        return _quiet("did not run")
    if not OUTCOMES[cell.worst].tried:
        return stacked(outcome(cell.worst), cell.note or cell.witness)
    recovery = cell.recovery.median if cell.recovery is not None else None
    key = math.inf if not OUTCOMES[cell.worst].kept and recovery is None else recovery
    of = f"{cell.outcomes.get(cell.worst, 0)} of {cell.n}" if len(cell.outcomes) > 1 else ""
    whole = (("full rate", cell.full_rate), ("redundant", cell.redundancy))
    parts = [f"{name} {median_of(metric, unit=True)}" for name, metric in whole if metric]
    samples = median_of(cell.samples_lost)
    lost = "lost unknown" if samples == MISSING else f"{samples} lost"
    return stacked(
        outcome(cell.worst, of or f"n = {cell.n}"),
        _time(cell),
        " · ".join(parts),
        f"goodput {median_of(cell.goodput)} · {lost}",
        _ahead(facts.ahead(label, family)),
        key=0.0 if cell.worst == "masked" and key is None else key,
    )


def _quiet(text: str) -> Cell:
    return stacked(Markup('<span class="quiet">{}</span>').format(text))


def _ahead(text: str) -> Markup:
    return Markup('<span class="ahead">{}</span>').format(text) if text else Markup("")


def _shown(value: str, bounds: str = "", more: str = "") -> Markup:
    """The main figure of a cell, with its interval."""
    small = Markup(' <small class="quiet">{}</small>').format(bounds) if bounds else ""
    return Markup('<span class="time{}">{}{}</span>').format(more, value, small)


def _time(cell: CellSummary) -> Markup | str:
    if cell.recovery is None or cell.recovery.median is None:
        return "nothing to recover from" if cell.worst == "masked" else "no time measured"
    never = " never" if math.isinf(cell.recovery.median) else ""
    return _shown(median_of(cell.recovery, unit=True), interval(cell.recovery.ci95), never)


def ratios(facts: ComparisonFacts) -> Table:
    """Each stack's recovery time divided by that of the stack it is compared with, by pairs of the
    same seed.
    """
    pooled = any(ratio.family == EVERY for ratio in facts.comparison.ratios)
    families = [EVERY, *facts.families] if pooled else facts.families
    rows = [
        [label, *(_ratio(facts, label, family) for family in families)]
        for label in facts.labels
        if label != facts.reference
    ]
    name = "Recovery time as a multiple of that of the stack it is compared with"
    return table(["stack", *_scores(families)], rows, name=name)


def _ratio(facts: ComparisonFacts, label: str, family: str) -> Cell:
    ratio = facts.ratio(label, family)
    if ratio is None:
        against = facts.against(label)
        mine = facts.cell(against, family)
        still = mine is not None and mine.worst == "masked"
        return _quiet(f"{against} did not stop" if still else "no pair of times")
    times = "×" if ratio.value is not None and math.isfinite(ratio.value) else ""
    guess = "at least" if ratio.says == "too few" else "about"
    ahead = ratio.says in ("faster", "only this one recovers")
    rest = ("" if ahead else f"{ratio.says}, ") + plural(ratio.n, "pair")
    rest += f", {guess} {ratio.needed} would settle it" if ratio.needed else ""
    rest += f" with {ratio.against}" if ratio.against != facts.reference else ""
    return stacked(
        _shown(_multiple(ratio) + times, interval(ratio.interval)),
        _ahead(ratio.says if ahead else ""),
        rest,
        key=ratio.value,
    )


def _multiple(ratio: Ratio) -> str:
    """Rounded towards no difference."""
    return number(ratio.value, "higher" if (ratio.value or 0) > 1 else "lower")


def every_ratio(facts: ComparisonFacts) -> Table:
    """All ratios of all metrics, one a row."""
    columns = ["stack", "against", *_RATIO, numeric("pairs that would settle it")]
    known = [*facts.comparison.ratios, *facts.comparison.same]
    return table(
        columns,
        [
            [one.label, one.against, *_ratio_row(one), str(one.needed) if one.needed else ""]
            for one in known
        ],
    )


def same(facts: ComparisonFacts) -> Table:
    """The reference against itself."""
    rows = [_ratio_row(one) for one in facts.comparison.same]
    return table(_RATIO, rows, name="The reference against itself")


_RATIO = (
    "fault",
    "metric",
    numeric("ratio", "median"),
    Column(name="interval", unit="95 %"),
    numeric("pairs"),
    "says",
)


def _ratio_row(one: Ratio) -> list[str | Cell]:
    between = interval(one.interval) or MISSING
    value = stacked(_multiple(one), key=one.value)
    return [one.family, one.metric, value, between, str(one.n), one.says]


def phases(facts: ComparisonFacts, family: str) -> Table:
    """Median seconds of each phase under one family."""
    found = {
        label: c.phases for label in facts.labels if (c := facts.cell(label, family)) and c.phases
    }
    names = [p for p in PHASE_NAMES if any(p in x for x in found.values())]
    names += sorted({p for x in found.values() for p in x} - set(names))
    rows = [
        [
            label,
            *(count(x.get(n), "lower", FINEST_S) for n in names),
            facts.phased(label, family),
        ]
        for label, x in found.items()
    ]
    columns = ["stack", *(numeric(name, "s") for name in names), numeric("n")]
    return table(columns, rows, name=f"Median seconds of each phase: {family}")


def goodput(facts: ComparisonFacts) -> Table:
    """Goodput with the fault, and of the control without it."""
    return _by_family(facts, _goodput, "Goodput by kind of fault")


def cost(facts: ComparisonFacts) -> Table:
    """Rank-hours, and money, that one failure costs."""
    return _by_family(facts, _cost, "Cost of one failure")


def _by_family(
    facts: ComparisonFacts, cell: Callable[[ComparisonFacts, str, str], Cell], name: str
) -> Table:
    rows = [[x, *(cell(facts, x, family) for family in facts.families)] for x in facts.labels]
    return table(["stack", *_scores(facts.families)], rows, name=name)


def _goodput(facts: ComparisonFacts, label: str, family: str) -> Cell:
    cell = facts.cell(label, family)
    if cell is None or cell.goodput is None:
        return stacked(MISSING)
    trials = facts.trials(label, family)
    controls = [t.control_goodput for t in trials if t.control_goodput is not None]
    without = ""
    if controls:
        low, high = min(controls), max(controls)
        ends = number(low, "higher") if low == high else range_of((low, high))
        without = f"without the fault {ends}"
    ratio, compared = facts.ratio(label, family, "goodput"), Markup("")
    if ratio is not None and ratio.value is not None:
        words = {"faster": "more", "slower": "less", "too few": "too few pairs to say"}
        kind = "ahead" if ratio.says == "faster" else "quiet under"
        said = f"{number(ratio.value, 'higher')}× {ratio.against}’s"
        compared = Markup('<span class="{}">{}: {}</span>').format(
            kind, said, words.get(ratio.says, ratio.says)
        )
    shown = _shown(median_of(cell.goodput), interval(cell.goodput.ci95))
    return stacked(shown, without, compared, key=cell.goodput.median)


def _cost(facts: ComparisonFacts, label: str, family: str) -> Cell:
    cell = facts.cell(label, family)
    hours = cell.cost_gpu_hours if cell is not None else None
    if hours is None:
        return stacked(MISSING)
    if math.isinf(hours):
        return stacked(_shown("no end", more=" never"), key=hours)
    shown = [with_unit(hours, COST_UNIT, "lower")]
    if (money := facts.money(hours)) is not None:
        shown.insert(0, with_unit(money, facts.comparison.currency, "lower"))
    return stacked(_shown(shown[0]), *shown[1:], key=hours)


def at_rest(facts: ComparisonFacts) -> Table:
    """Idle spares and false alarms of each stack while no fault acts."""
    columns = [
        wide("stack"),
        numeric("ranks"),
        numeric("spares"),
        numeric("share that waits"),
        numeric("false alarms"),
        numeric("unfaulted rank-hours"),
        wide("per rank-hour"),
    ]
    rows = [
        [one.label, str(one.ranks), str(one.spares), percent(one.share), *alarms(one.false_alarms)]
        for one in facts.comparison.at_rest
    ]
    return table(columns, rows, name="Stacks while nothing fails")


def key_of_outcomes(facts: ComparisonFacts) -> list[tuple[Markup, str]]:
    """Shape, word and meaning of the outcomes on the page."""
    used = {trial.outcome for trial in facts.comparison.trials} | {
        cell.worst for cell in facts.comparison.cells
    }
    return [(outcome(name), known.meaning) for name, known in OUTCOMES.items() if name in used]


def witnesses(facts: ComparisonFacts) -> Table:
    """Evidence for each outcome."""
    columns = [
        "fault",
        "stack",
        "outcome",
        numeric("steps lost"),
        numeric("samples lost"),
        numeric("detected", "s, median"),
        numeric("full rate", "s, median"),
        numeric("redundant", "s, median"),
        Column(name="survived", unit="95 %"),
        numeric("ETTR"),
        numeric("cost", f"{COST_UNIT} a failure"),
        wide("witness"),
    ]
    cells = [facts.cell(label, family) for family in facts.families for label in facts.labels]
    rows = [_witness(cell) for cell in cells if cell is not None]
    return table(columns, rows, name="Witnesses of the outcomes")


def _witness(cell: CellSummary) -> list[str | Cell]:
    every = ", ".join(f"{name} {n}" for name, n in cell.outcomes.items())
    seeds = ", ".join(map(str, cell.outliers))
    return [
        cell.family,
        cell.label,
        stacked(
            outcome(cell.worst, every if len(cell.outcomes) > 1 else ""),
            key=str(OUTCOME_ORDER[cell.worst]),
        ),
        middle(cell.steps_lost),
        middle(cell.samples_lost),
        middle(cell.detection, FINEST_S),
        middle(cell.full_rate),
        middle(cell.redundancy),
        survived(cell.survival) or MISSING,
        middle(cell.ettr),
        count(cell.cost_gpu_hours, "lower"),
        stacked(
            cell.witness,
            cell.note,
            f"far from the others, kept: seed {seeds}" if cell.outliers else "",
        ),
    ]


def trials(facts: ComparisonFacts) -> Table:
    """Every trial, with the command to repeat it."""
    columns = [
        "fault",
        "stack",
        numeric("seed"),
        "outcome",
        numeric("recovery", "s"),
        numeric("detection", "s"),
        numeric("full rate", "s"),
        numeric("redundant", "s"),
        numeric("lost", "steps"),
        numeric("goodput"),
        numeric("wall clock", "s"),
        numeric("step", "s"),
        "verdict",
        wide("command to repeat it, and its record"),
    ]
    return table(columns, [_trial(trial) for trial in facts.comparison.trials], name="Every trial")


def _trial(t: Trial) -> list[str | Cell]:
    record = (t.run, t.control_run and f"control {t.control_run}", t.note)
    return [
        t.family,
        t.label,
        str(t.seed),
        stacked(outcome(t.outcome), key=str(OUTCOME_ORDER[t.outcome])),
        count(t.recovery, "lower", FINEST_S),
        count(t.detection, "lower", FINEST_S),
        count(t.full_rate, "lower", FINEST_S),
        count(t.redundancy, "lower", FINEST_S),
        str(t.steps_lost),
        count(t.goodput, "higher"),
        count(t.wall, "lower"),
        count(t.step_time, "lower", FINEST_S),
        t.verdict,
        stacked(Markup("<code>{}</code>").format(t.reproduce), " · ".join(filter(None, record))),
    ]


def settings(facts: ComparisonFacts) -> Table:
    """Settings of each stack, the reasons, and versions."""
    columns = [
        "stack",
        wide("description"),
        wide("settings"),
        wide("why these"),
        wide("versions"),
    ]
    rows = [
        [
            stack.label,
            stack.description,
            pairs(stack.chosen) or "all defaults",
            stack.because or MISSING,
            pairs(dict(stack.versions)) or MISSING,
        ]
        for stack in facts.comparison.stacks
    ]
    return table(columns, rows, name="Settings and versions")


def outcome(name: OutcomeClass, note: str = "") -> Markup:
    """Mark and word of an outcome; the mark is hidden from screen readers and from Markdown."""
    traits = OUTCOMES[name]
    tone = "kept" if traits.kept else "lost" if traits.tried else "none"
    small = Markup(' <small class="quiet">{}</small>').format(note) if note else ""
    return Markup('<span class="outcome {}" data-mark="{}"><span>{}{}</span></span>').format(
        tone, traits.mark, name, small
    )


def count(value: float | None, better: str = "neither", finest: float = 0.0) -> Cell:
    """A cell with one number."""
    return stacked(number(value, better, finest), key=value)


def middle(metric: Metric | None, finest: float = 0.0) -> Cell:
    """A cell with the median of a metric."""
    if metric is None:
        return stacked(MISSING)
    if metric.median == math.inf and metric.unit != "s":
        return stacked("all", key=metric.median)
    shown = number(metric.median, metric.better, finest) if finest else median_of(metric)
    return stacked(shown, key=metric.median)
