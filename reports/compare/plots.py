"""Charts of a comparison, one row per stack, each with its finding as its title."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.chaos.units import listed, number, plural, with_unit
from trainchaos.harness.compare.result.model import Trial
from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.content.figures import median_of
from trainchaos.reports.page import charts
from trainchaos.reports.page.charts import Chart, Course, Point, Times, in_order, short


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Loss of one trial over its control's."""

    label: str
    title: str
    drawing: Markup


def times(facts: ComparisonFacts, family: str) -> Chart | None:
    """Every recovery time of a family, by stack, on a logarithmic scale that all stacks share."""
    rows = []
    for label in facts.labels:
        cell = facts.cell(label, family)
        timed = [t for t in facts.trials(label, family) if t.recovery is not None]
        if timed and cell is not None and cell.recovery is not None:
            rows.append(
                Times(
                    name=label,
                    points=[_point(trial, trial.seed in cell.outliers) for trial in timed],
                    median=cell.recovery.median,
                    bounds=cell.recovery.ci95,
                    value=median_of(cell.recovery, unit=True),
                )
            )
    return charts.times(_times_finding(facts, family), rows, logarithmic=True) if rows else None


def _point(trial: Trial, outlier: bool) -> Point:
    seconds = trial.recovery or 0.0
    words = f"{with_unit(seconds, 's', 'lower')}; seed {trial.seed}"
    return Point(value=seconds, flagged=outlier, words=words)


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
    said = f"{family}: {finite[0][1]} recovers first, in {number(finite[0][0], 'lower')} s"
    if len(finite) > 1:
        slowest, label = finite[-1]
        said += f"; the slowest that does, {label}, in {number(slowest, 'lower')} s"
    return said + tail


def waterfall(facts: ComparisonFacts, family: str) -> Chart | None:
    """The incident of median recovery time of each stack, phase by phase, on one linear scale."""
    known = {label: facts.typical(label, family) for label in facts.labels}
    found = {label: trial for label, trial in known.items() if trial is not None}
    if not found:
        return None
    rows = [
        Course(
            name=label,
            phases=trial.phases,
            ends=trial.recovery,
            words=f"{family}, seed {trial.seed}",
            value=with_unit(trial.recovery, "s", "lower"),
        )
        for label, trial in found.items()
    ]
    return charts.courses(_waterfall_finding(family, list(found.values())), rows)


def _waterfall_finding(family: str, trials: Sequence[Trial]) -> str:
    often = Counter(max(one.phases, key=lambda span: span.seconds).name for one in trials)
    top = max(often.values())
    names = [name for name, count in often.items() if count == top]
    verb, each = ("takes", "") if len(names) == 1 else ("take", " each")
    of = plural(len(trials), "stack")
    return f"{family}: {listed(names)} {verb} longest, in {top}{each} of {of}"


def wall(facts: ComparisonFacts, family: str) -> Chart | None:
    """Wall time of the faulted arms by class and stack: useful time first, the rest is badput."""
    splits = {label: facts.mean_wall(label, family) for label in facts.labels}
    found = {
        label: {name: split[name] for name in in_order(split)}
        for label, split in splits.items()
        if split
    }
    return charts.shares(f"{family}: useful time", found) if found else None


def losses(facts: ComparisonFacts, family: str) -> list[Curve]:
    """The first trial of each stack that has losses, over its control's."""
    found = []
    for label in facts.labels:
        trial = next(
            (t for t in facts.trials(label, family) if t.losses and t.control_losses), None
        )
        if trial is not None:
            title = _loss_finding(trial)
            words = f"{label}, {family}, seed {trial.seed}: loss {title}"
            found.append(Curve(label=label, title=title, drawing=_curves(trial, words)))
    return found


def _curves(trial: Trial, label: str) -> Markup:
    """Two overlaid lines, the control's broad and grey; stretched to the available width."""
    series = [
        [(step, loss) for step, loss in one if math.isfinite(loss)]
        for one in (trial.control_losses, trial.losses)
    ]
    every = [point for one in series for point in one]
    if not every:
        return Markup("")
    (left, right), (low, high) = ((min(x), max(x)) for x in zip(*every, strict=True))
    paths = [
        " ".join(
            f"{short((x - left) / ((right - left) or 1) * 200)},"
            f"{short(76 - (y - low) / ((high - low) or 1) * 72)}"
            for x, y in one
        )
        for one in series
    ]
    return Markup(
        '<svg class="curve" viewBox="0 0 200 80" preserveAspectRatio="none" role="img"'
        ' aria-label="{0}"><title>{0}</title><polyline class="control" points="{1}"/><polyline'
        ' class="faulted" points="{2}"/></svg>'
    ).format(label, *paths)


def _loss_finding(trial: Trial) -> str:
    control = dict(trial.control_losses)
    both = [(step, value, control[step]) for step, value in trial.losses if step in control]
    if not both:
        return "no step in common with the control"
    bad = [step for step, value, _ in both if not math.isfinite(value)]
    if bad:
        return f"not finite from step {bad[0]} on"
    apart = [(step, abs(value - other)) for step, value, other in both if value != other]
    last, end = trial.losses[-1][0], trial.control_losses[-1][0]
    short_of = f", ends at step {last} of {end}" if last < end else ""
    if not apart:
        return f"same at all {plural(len(both), 'step')} compared{short_of}"
    most = number(max(a for _, a in apart), "lower")
    return f"apart from step {apart[0][0]} on, by at most {most}{short_of}"
