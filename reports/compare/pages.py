"""``compare.html``, a self-contained page that needs no network and whose script only sorts tables,
and ``compare.md``, the same tables for a pull request, a wiki or a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.units import flatten, number, pairs, plural
from trainchaos.harness.compare.result.model import Comparison
from trainchaos.harness.compare.result.statistics import EVERY
from trainchaos.reports.compare import plots, tables
from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.compare.words import findings
from trainchaos.reports.content.tables import (
    Table,
    as_markdown,
    bullets,
    code_lines,
    pipes,
    plain,
    section,
)
from trainchaos.reports.page.fill import fill, styles

_MACHINE = ("processor", "cores", "memory_gib", "cuda_devices")
_REST = "compare.json"


def html(comparison: Comparison) -> str:
    """The text of the page."""
    facts = ComparisonFacts(comparison)
    headline, *others = findings(facts)
    panels = [
        {
            "family": family,
            "times": plots.times(facts, family),
            "waterfall": plots.waterfall(facts, family),
            "phases": tables.phases(facts, family),
            "wall": plots.wall(facts, family),
            "losses": plots.losses(facts, family),
        }
        for family in facts.families
    ]
    context = {
        "css": styles("report.css", "chart.css", "compare.css"),
        "script": styles("compare.js"),
        "comparison": comparison,
        "headline": headline,
        "findings": others,
        "about": _about(comparison),
        "setup": _setup(comparison),
        "scorecard": tables.scorecard(facts, facts.counted),
        "apart": tables.scorecard(facts, facts.apart) if facts.apart else None,
        "key": tables.key_of_outcomes(facts),
        "ratios": tables.ratios(facts),
        "pooled": EVERY if any(ratio.family == EVERY for ratio in comparison.ratios) else "",
        "panels": panels,
        "goodput": tables.goodput(facts),
        "cost": tables.cost(facts),
        "at_rest": tables.at_rest(facts),
        "price": _price(comparison),
        "witnesses": tables.witnesses(facts),
        "settings": tables.settings(facts),
        "fidelity": [(s.label, s.fidelity) for s in comparison.stacks if s.fidelity],
        "same": tables.same(facts),
        "trials": tables.trials(facts),
        "systems": _systems(comparison),
    }
    return fill("compare.html.j2", context)


def markdown(comparison: Comparison) -> str:
    """The text of the file."""
    return "\n".join(_lines(ComparisonFacts(comparison))) + "\n"


def _lines(facts: ComparisonFacts) -> Iterator[str]:
    comparison = facts.comparison
    headline, *others = (line.striptags() for line in findings(facts))
    yield from (f"## {plain(headline)}", "", *bullets(others), "")
    finished = comparison.finished or "not finished"
    yield plain(f"{comparison.name}, {comparison.started} to {finished}")
    yield from _titled("Scorecard", tables.scorecard(facts, facts.counted))
    apart = "Faults that only a training script's own checks can notice"
    yield from _titled(apart, tables.scorecard(facts, facts.apart) if facts.apart else None)
    yield from (
        "",
        "Outcome (the worst of the trials), median recovery time with its distribution-free 95 %"
        " interval (from 6 values on), until the job was at its full rate and as safe as before,"
        " goodput, samples lost. Times are rounded up, goodput down.",
    )
    if comparison.missing:
        missing = plural(comparison.missing, "arm")
        yield from ("", f"Not finished: {missing} of the plan did not run yet.")
    if comparison.cautions:
        yield from section("Pairs that are not fully comparable")
        yield from bullets(comparison.cautions)
    yield from _names("Did not run", ("stack", "why"), comparison.skipped)
    yield from _titled("Pair by pair", tables.every_ratio(facts), most=1000)
    yield from _titled("Cost of one failure", tables.cost(facts))
    yield from _titled("While nothing fails", tables.at_rest(facts))
    yield from _titled("Witnesses", tables.witnesses(facts), most=1000)
    yield from _names("Kinds of fault", ("fault", "what is done"), comparison.families)
    yield from _titled("Settings and versions", tables.settings(facts))
    notes = [f"{s.label}: {line}" for s in comparison.stacks for line in s.fidelity]
    if notes := [*comparison.fidelity, *notes]:
        yield from section("Differences from production")
        yield from bullets(notes)
    yield from section("Reproduce")
    yield from ("```sh", *code_lines(comparison.reproduce), "```")
    for name, rows in _systems(comparison):
        yield from section(name.capitalize())
        yield from bullets([f"{key}: {value}" for key, value in rows])


def _titled(title: str, shown: Table | None, most: int = 200) -> Iterator[str]:
    """A section with a table; nothing without a row."""
    if shown is not None and shown.rows:
        yield from section(title)
        yield from as_markdown(shown, most=most, rest=_REST)


def _names(title: str, head: tuple[str, str], rows: dict[str, str]) -> Iterator[str]:
    if rows:
        yield from section(title)
        yield from pipes(head, list(rows.items()), "ll", rest=_REST)


def _systems(comparison: Comparison) -> list[tuple[str, list[tuple[str, str]]]]:
    return [("machine", flatten(comparison.machine)), ("workload", flatten(comparison.workload))]


def _about(comparison: Comparison) -> str:
    """What was run, and when."""
    ran = {stack.label for stack in comparison.stacks} & {t.label for t in comparison.trials}
    counts = (
        plural(len(ran), "stack"),
        plural(len(comparison.families), "kind") + " of fault",
        plural(len(comparison.trials), "pair") + " of arms, same seeds for each",
    )
    until = f" to {comparison.finished}" if comparison.finished else ", not finished"
    return " · ".join((*counts, comparison.started + until))


def _setup(comparison: Comparison) -> str:
    """The machine, and the training job."""
    machine = {k: v for k, v in comparison.machine.items() if k in _MACHINE and v not in ([], None)}
    return "; ".join(filter(None, (pairs(machine), pairs(comparison.workload))))


def _price(comparison: Comparison) -> str:
    if comparison.price is None:
        return "No price of a GPU hour was given (--price), so hours only."
    return f"At {number(comparison.price)} {comparison.currency} for an hour of one GPU."
