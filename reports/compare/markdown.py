"""``compare.md``: the comparison for a pull request, a wiki or a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainchaos.harness.compare.result.model import CellSummary, Comparison
from trainchaos.harness.judge.figures import Metric
from trainchaos.reports.compare import at_rest
from trainchaos.reports.compare.facts import OUTCOMES, ComparisonFacts
from trainchaos.reports.compare.words import COST_UNIT, findings
from trainchaos.reports.content.figures import (
    MISSING,
    few,
    flatten,
    interval,
    median_of,
    number,
    pairs,
    plural,
    survived,
    with_unit,
)
from trainchaos.reports.content.markdown_text import code_lines, escape, section, table

_REST = "compare.json"


def render(comparison: Comparison) -> str:
    """The text of the file."""
    return "\n".join(_lines(ComparisonFacts(comparison))) + "\n"


def _lines(facts: ComparisonFacts) -> Iterator[str]:
    comparison = facts.comparison
    said = [line.striptags() for line in findings(facts)]
    yield f"## {escape(said[0])}"
    yield ""
    yield from (f"- {escape(line)}" for line in said[1:])
    yield ""
    yield escape(
        f"{comparison.name}, {comparison.started} to {comparison.finished or 'not finished'}"
    )
    yield from section("Scorecard")
    yield from _scorecard(facts, facts.counted)
    if facts.apart:
        yield from section("Faults that only a training script's own checks can notice")
        yield from _scorecard(facts, facts.apart)
    yield ""
    yield (
        "Outcome (the worst of the trials), median recovery time with its distribution-free 95"
        " % interval (from 6 values on), until the job was at its full rate and as safe as before,"
        " goodput, samples lost. Times are rounded up, goodput down."
    )
    if comparison.missing:
        yield from (
            "",
            f"Not finished: {plural(comparison.missing, 'arm')} of the plan did not run yet.",
        )
    if comparison.cautions:
        yield from section("Pairs that are not fully comparable")
        yield from (f"- {escape(line)}" for line in comparison.cautions)
    if comparison.skipped:
        yield from section("Did not run")
        yield from table(("stack", "why"), list(comparison.skipped.items()), "ll", rest=_REST)
    yield from _ratios(facts)
    yield from _costs(facts)
    if facts.comparison.at_rest:
        yield from section("While nothing fails")
        yield from table(at_rest.HEAD, at_rest.rows(facts), "lrrrrrl", rest=_REST)
    yield from _witnesses(facts)
    yield from section("Kinds of fault")
    yield from table(("fault", "what is done"), list(comparison.families.items()), "ll", rest=_REST)
    yield from section("Settings and versions")
    body = [
        (
            s.label,
            pairs(s.chosen) or "all defaults",
            s.because or MISSING,
            pairs(dict(s.versions)) or MISSING,
        )
        for s in comparison.stacks
    ]
    yield from table(("stack", "settings", "why these", "versions"), body, "llll", rest=_REST)
    yield from _notes(facts)
    yield from section("Reproduce")
    yield from ("```sh", *code_lines(comparison.reproduce), "```")
    for name, data in (("Machine", comparison.machine), ("Workload", comparison.workload)):
        yield from section(name)
        yield from (f"- {escape(key)}: {escape(value)}" for key, value in flatten(data))


def _scorecard(facts: ComparisonFacts, families: Sequence[str]) -> Iterator[str]:
    head = ("stack", *families, "step without a fault, times the bare one")
    body = [
        (label, *(_score(facts, label, f) for f in families), median_of(facts.slowest_step(label)))
        for label in facts.labels
    ]
    yield from table(head, body, "l" * (len(head) - 1) + "r", rest=_REST)


def _score(facts: ComparisonFacts, label: str, family: str) -> str:
    cell = facts.cell(label, family)
    if cell is None:
        return "did not run"
    if not OUTCOMES[cell.worst].tried:
        return f"{cell.worst}: {cell.note or cell.witness}"
    parts = [
        _outcome(cell),
        _time(cell.recovery),
        *_whole(cell),
        f"goodput {median_of(cell.goodput)}",
        *((f"ETTR {median_of(cell.ettr)}",) if cell.ettr is not None else ()),
        *((f"survived {survived(cell.survival)}",) if cell.survival is not None else ()),
        _lost(cell),
        facts.ahead(label, family),
    ]
    return "; ".join(part for part in parts if part)


def _outcome(cell: CellSummary) -> str:
    if len(cell.outcomes) > 1:
        return f"{cell.worst} ({cell.outcomes.get(cell.worst, 0)} of {cell.n})"
    return f"{cell.worst} (n = {cell.n})"


def _time(metric: Metric | None) -> str:
    if metric is None or metric.median is None:
        return ""
    between = f" {interval(metric.ci95)}" if metric.ci95 else ""
    return with_unit(metric.median, metric.unit, metric.better) + between + few(metric)


def _whole(cell: CellSummary) -> list[str]:
    known = (("full rate", cell.full_rate), ("redundant", cell.redundancy))
    return [
        f"{name} {median_of(metric, unit=True)}" for name, metric in known if metric is not None
    ]


def _lost(cell: CellSummary) -> str:
    known = cell.samples_lost is not None and cell.samples_lost.median is not None
    return f"{median_of(cell.samples_lost)} samples lost" if known else "samples lost unknown"


def _ratios(facts: ComparisonFacts) -> Iterator[str]:
    body = []
    for ratio in (*facts.comparison.ratios, *facts.comparison.same):
        better = "higher" if (ratio.value or 0) > 1 else "lower"
        between = interval(ratio.interval) or MISSING
        body.append(
            (
                *(ratio.label, ratio.against, ratio.family, ratio.metric),
                *(number(ratio.value, better), between, str(ratio.n), ratio.says),
                str(ratio.needed) if ratio.needed else "",
            )
        )
    if body:
        yield from section("Pair by pair")
        head = (
            "stack",
            "against",
            "fault",
            "metric",
            "ratio",
            "95 %",
            "pairs",
            "says",
            "pairs that would settle it",
        )
        yield from table(head, body, "llllrlrlr", most=1000, rest=_REST)


def _costs(facts: ComparisonFacts) -> Iterator[str]:
    body = []
    for label in facts.labels:
        row = [label]
        for family in facts.families:
            cell = facts.cell(label, family)
            hours = cell.cost_gpu_hours if cell is not None else None
            row.append(_cost(hours, facts.money(hours), facts.comparison.currency))
        body.append(row)
    if body:
        yield from section("Cost of one failure")
        yield from table(
            ("stack", *facts.families), body, "l" + "r" * len(facts.families), rest=_REST
        )


def _cost(hours: float | None, money: float | None, currency: str) -> str:
    if hours is not None and math.isinf(hours):
        return "no end"
    spent = f" ({with_unit(money, currency, 'lower')})" if money is not None else ""
    return with_unit(hours, COST_UNIT, "lower") + spent


def _witnesses(facts: ComparisonFacts) -> Iterator[str]:
    body = [
        (
            c.family,
            c.label,
            ", ".join(f"{name} {n}" for name, n in c.outcomes.items()),
            c.witness,
            c.note,
        )
        for c in facts.comparison.cells
    ]
    if body:
        yield from section("Witnesses")
        yield from table(
            ("fault", "stack", "outcomes", "witness", "note"), body, "lllll", most=1000, rest=_REST
        )


def _notes(facts: ComparisonFacts) -> Iterator[str]:
    lines = [*facts.comparison.fidelity]
    lines += [
        f"{stack.label}: {line}" for stack in facts.comparison.stacks for line in stack.fidelity
    ]
    if lines:
        yield from section("Differences from production")
        yield from (f"- {escape(line)}" for line in lines)
