"""Plots of a comparison, one row per stack, each with its finding as its title."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.harness.compare.result.model import Trial
from trainchaos.harness.judge.incident import PHASE_NAMES
from trainchaos.reports.compare.facts import ComparisonFacts, listed
from trainchaos.reports.compare.shapes import AxisScale, curves, points, ruler, shares, slug, spans
from trainchaos.reports.compare.words import exact, median
from trainchaos.reports.content.figures import number, percent, percents, plural

_CLASSES = (
    "useful",
    "initialisation",
    "data",
    "checkpoint_save",
    "detection",
    "regroup",
    "restore",
    "recomputation",
    "degraded_world",
    "straggling",
    "spare_idle",
    "shutdown",
    "other",
)


@dataclass(frozen=True, kw_only=True)
class PlotRow:
    """One row: name, drawing, and the number it stands for."""

    name: str
    drawing: Markup
    value: Markup


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows that share a scale; ``ruler``: the axis above them, hidden from readers; ``keys``:
    (class, word).
    """

    title: str
    ruler: Markup
    lines: tuple[PlotRow, ...]
    keys: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Loss of one trial over its control's."""

    label: str
    title: str
    drawing: Markup


def times(facts: ComparisonFacts, family: str) -> Chart | None:
    """Every recovery time of a family, by stack, on a logarithmic scale that all stacks share."""
    found = {label: _timed(facts, label, family) for label in facts.labels}
    every = [t.recovery for trials in found.values() for t in trials if t.recovery is not None]
    if not every:
        return None
    scale = AxisScale(every, logarithmic=True)
    lines = []
    for label, trials in found.items():
        cell = facts.cell(label, family)
        if not trials or cell is None or cell.recovery is None:
            continue
        values = [(t.recovery or 0.0, t.seed in cell.outliers) for t in trials]
        said = ", ".join(number(value, "lower") for value, _ in values)
        words = f"{label}, {family}: {plural(len(values), 'recovery time')} in seconds: {said}"
        drawing = points(scale, values, cell.recovery.median, cell.recovery.ci95, words)
        lines.append(PlotRow(name=label, drawing=drawing, value=median(cell.recovery, unit=True)))
    never = any(math.isinf(value) for value in every)
    return Chart(
        title=_times_finding(facts, family),
        ruler=ruler(scale, "s, logarithmic", never),
        lines=tuple(lines),
    )


def _timed(facts: ComparisonFacts, label: str, family: str) -> list[Trial]:
    return [t for t in facts.trials(label, family) if t.recovery is not None]


def _times_finding(facts: ComparisonFacts, family: str) -> str:
    known = [
        (value, label)
        for label in facts.labels
        if (value := facts.recovery(label, family)) is not None
    ]
    finite = sorted(entry for entry in known if math.isfinite(entry[0]))
    never = len(known) - len(finite)
    tail = f"; {never} of {plural(len(known), 'stack')} did not" if never else ""
    if not finite:
        return f"{family}: no stack recovers" if known else f"{family}: nothing to recover from"
    fastest = f"{family}: {finite[0][1]} recovers first, in {number(finite[0][0], 'lower')} s"
    if len(finite) > 1:
        fastest += (
            f"; the slowest that does, {finite[-1][1]}, in {number(finite[-1][0], 'lower')} s"
        )
    return fastest + tail


def waterfall(facts: ComparisonFacts, family: str) -> Chart | None:
    """The incident of median recovery time of each stack, phase by phase, on one linear scale."""
    found = {
        label: trial
        for label in facts.labels
        if (trial := facts.typical(label, family)) is not None
    }
    if not found:
        return None
    ends = [span.start + span.seconds for trial in found.values() for span in trial.phases]
    scale = AxisScale(ends, logarithmic=False)
    lines = []
    for label, trial in found.items():
        parts = ", ".join(
            f"{span.name} {number(span.seconds, 'lower', 1e-4)} s" for span in trial.phases
        )
        words = f"{label}, {family}, seed {trial.seed}: {parts}"
        drawing = spans(scale, trial.phases, trial.recovery, words)
        lines.append(
            PlotRow(
                name=label, drawing=drawing, value=exact(trial.recovery, _seconds(trial.recovery))
            )
        )
    names = {span.name for trial in found.values() for span in trial.phases}
    ordered = [p for p in PHASE_NAMES if p in names] + sorted(names - set(PHASE_NAMES))
    never = any(trial.recovery == math.inf for trial in found.values())
    return Chart(
        title=_waterfall_finding(family, list(found.values())),
        ruler=ruler(scale, "s since the fault", never),
        lines=tuple(lines),
        keys=tuple((slug(name), name) for name in ordered),
    )


def _seconds(value: float | None) -> str:
    text = number(value, "lower")
    return f"{text} s" if text[:1].isdigit() else text


def _waterfall_finding(family: str, trials: Sequence[Trial]) -> str:
    most = []
    for trial in trials:
        longest = max(trial.phases, key=lambda span: span.seconds)
        most.append(longest.name)
    often = Counter(most)
    top = max(often.values())
    names = [name for name, count in often.items() if count == top]
    verb, each = ("takes", "") if len(names) == 1 else ("take", " each")
    return (
        f"{family}: {listed(names)} {verb} longest, in {top}{each} of {plural(len(most), 'stack')}"
    )


def wall(facts: ComparisonFacts, family: str) -> Chart | None:
    """Wall time of the faulted arms by class and stack: useful time first, the rest is badput."""
    found = {label: split for label in facts.labels if (split := facts.mean_wall(label, family))}
    if not found:
        return None
    scale = AxisScale(
        [sum(split.values()) for split in found.values()], logarithmic=False, room=98.0
    )
    names = list(dict.fromkeys(name for split in found.values() for name in split))
    ordered = [c for c in _CLASSES if c in names] + [c for c in names if c not in _CLASSES]
    lines = []
    for label, split in found.items():
        parts = [(name, split[name]) for name in ordered if name in split]
        words = f"{label}, {family}, mean seconds: " + ", ".join(
            f"{_words(n)} {number(s)}" for n, s in parts
        )
        share = split["useful"] / (sum(split.values()) or 1.0)
        lines.append(
            PlotRow(name=label, drawing=shares(scale, parts, words), value=Markup(percent(share)))
        )
    keys = tuple((slug(name), _words(name)) for name in ordered)
    title = _wall_finding(family, found)
    return Chart(
        title=title, ruler=ruler(scale, "s; useful, %", False), lines=tuple(lines), keys=keys
    )


def _wall_finding(family: str, found: dict[str, dict[str, float]]) -> str:
    lost: dict[str, float] = {}
    for split in found.values():
        for name, seconds in split.items():
            if name != "useful":
                lost[name] = lost.get(name, 0.0) + seconds
    useful = [split["useful"] / (sum(split.values()) or 1.0) for split in found.values()]
    lead = f"{family}: useful time is {percents(min(useful), max(useful))}"
    return (
        f"{lead}; most of the rest is {_words(max(lost, key=lambda n: lost[n]))}" if lost else lead
    )


def _words(name: str) -> str:
    return name.replace("_", " ")


def losses(facts: ComparisonFacts, family: str) -> list[Curve]:
    """The first trial of each stack that has losses, over its control's."""
    found = []
    for label in facts.labels:
        trial = next(
            (t for t in facts.trials(label, family) if t.losses and t.control_losses), None
        )
        if trial is None:
            continue
        title = _loss_finding(trial)
        drawing = curves(
            trial.control_losses,
            trial.losses,
            f"{label}, {family}, seed {trial.seed}: loss {title}",
        )
        found.append(Curve(label=label, title=title, drawing=drawing))
    return found


def _loss_finding(trial: Trial) -> str:
    control = dict(trial.control_losses)
    both = [(step, value, control[step]) for step, value in trial.losses if step in control]
    if not both:
        return "no step in common with the control"
    bad = [step for step, value, _ in both if not math.isfinite(value)]
    if bad:
        return f"not finite from step {bad[0]} on"
    apart = [(step, abs(value - other)) for step, value, other in both if value != other]
    short = trial.losses[-1][0] < trial.control_losses[-1][0]
    end = f", ends at step {trial.losses[-1][0]} of {trial.control_losses[-1][0]}" if short else ""
    if not apart:
        return f"same at all {plural(len(both), 'step')} compared{end}"
    return (
        f"apart from step {apart[0][0]} on, by at most"
        f" {number(max(a for _, a in apart), 'lower')}{end}"
    )
