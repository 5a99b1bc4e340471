"""The long tables of a comparison: witnesses, trials, settings, the reference against itself."""

from __future__ import annotations

from markupsafe import Markup

from trainchaos.harness.compare.result.model import CellSummary, Trial
from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.compare.table import (
    FINEST_S,
    OUTCOME_ORDER,
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
from trainchaos.reports.compare.words import COST_UNIT, interval
from trainchaos.reports.content.figures import MISSING, pairs, survived


def witnesses(facts: ComparisonFacts) -> Table:
    """Evidence for each outcome."""
    columns = [
        Column(name="fault"),
        Column(name="stack"),
        Column(name="outcome"),
        Column(name="steps lost", kind="number"),
        Column(name="samples lost", kind="number"),
        Column(name="detected", unit="s, median", kind="number"),
        Column(name="full rate", unit="s, median", kind="number"),
        Column(name="redundant", unit="s, median", kind="number"),
        Column(name="survived", unit="95 %"),
        Column(name="ETTR", kind="number"),
        Column(name="cost", unit=f"{COST_UNIT} a failure", kind="number"),
        Column(name="witness", kind="wide"),
    ]
    rows = []
    for family in facts.families:
        for label in facts.labels:
            cell = facts.cell(label, family)
            if cell is not None:
                rows.append(_witness(label, family, cell))
    return table("Witnesses of the outcomes", columns, rows)


def _witness(label: str, family: str, cell: CellSummary) -> list[TableCell]:
    every = (
        ", ".join(f"{name} {n}" for name, n in cell.outcomes.items())
        if len(cell.outcomes) > 1
        else ""
    )
    said = Markup("{}").format(cell.witness)
    if cell.note:
        said += Markup('<span class="quiet under">{}</span>').format(cell.note)
    if cell.outliers:
        seeds = ", ".join(map(str, cell.outliers))
        said += Markup(
            '<span class="quiet under">far from the others, kept: seed {}</span>'
        ).format(seeds)
    return [
        text(family),
        text(label),
        TableCell(content=outcome(cell.worst, every), key=str(OUTCOME_ORDER[cell.worst])),
        middle(cell.steps_lost),
        middle(cell.samples_lost),
        middle(cell.detection, FINEST_S),
        middle(cell.full_rate),
        middle(cell.redundancy),
        text(survived(cell.survival) or MISSING),
        middle(cell.ettr),
        count(cell.cost_gpu_hours, "", "lower"),
        TableCell(content=said),
    ]


def trials(facts: ComparisonFacts) -> Table:
    """Every trial, with the command to repeat it."""
    columns = [
        Column(name="fault"),
        Column(name="stack"),
        Column(name="seed", kind="number"),
        Column(name="outcome"),
        Column(name="recovery", unit="s", kind="number"),
        Column(name="detection", unit="s", kind="number"),
        Column(name="full rate", unit="s", kind="number"),
        Column(name="redundant", unit="s", kind="number"),
        Column(name="lost", unit="steps", kind="number"),
        Column(name="goodput", kind="number"),
        Column(name="wall clock", unit="s", kind="number"),
        Column(name="step", unit="s", kind="number"),
        Column(name="verdict"),
        Column(name="command to repeat it, and its record", kind="wide"),
    ]
    known = facts.comparison.trials
    return table("Every trial", columns, [_trial(trial) for trial in known])


def _trial(t: Trial) -> list[TableCell]:
    record = " · ".join(
        part for part in (t.run, t.control_run and f"control {t.control_run}", t.note) if part
    )
    again = Markup('<code>{}</code><span class="quiet under">{}</span>').format(t.reproduce, record)
    return [
        text(t.family),
        text(t.label),
        text(t.seed, sort_key(t.seed)),
        TableCell(content=outcome(t.outcome), key=str(OUTCOME_ORDER[t.outcome])),
        count(t.recovery, "", "lower", FINEST_S),
        count(t.detection, "", "lower", FINEST_S),
        count(t.full_rate, "", "lower", FINEST_S),
        count(t.redundancy, "", "lower", FINEST_S),
        text(t.steps_lost, sort_key(t.steps_lost)),
        count(t.goodput, "", "higher"),
        count(t.wall, "", "lower"),
        count(t.step_time, "", "lower", FINEST_S),
        text(t.verdict),
        TableCell(content=again),
    ]


def settings(facts: ComparisonFacts) -> Table:
    """Settings of each stack, the reasons, and versions."""
    columns = [
        Column(name="stack"),
        Column(name="description", kind="wide"),
        Column(name="settings", kind="wide"),
        Column(name="why these", kind="wide"),
        Column(name="versions", kind="wide"),
    ]
    rows = []
    for stack in facts.comparison.stacks:
        chosen = pairs(stack.chosen) or "all defaults"
        versions = pairs(dict(stack.versions)) or MISSING
        row = (stack.label, stack.description, chosen, stack.because or MISSING, versions)
        rows.append([text(words) for words in row])
    return table("Settings and versions", columns, rows)


def same(facts: ComparisonFacts) -> Table:
    """The reference against itself."""
    columns = [
        Column(name="fault"),
        Column(name="metric"),
        Column(name="ratio", unit="median", kind="number"),
        Column(name="interval", unit="95 %"),
        Column(name="pairs", kind="number"),
        Column(name="says"),
    ]
    rows = [
        [
            text(r.family),
            text(r.metric),
            count(r.value),
            TableCell(content=interval(r.interval)),
            text(r.n, sort_key(r.n)),
            text(r.says),
        ]
        for r in facts.comparison.same
    ]
    return table("The reference against itself", columns, rows)
