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
    bullets,
    code_lines,
    plain,
    section,
    table,
    titled,
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
    headline, *others = findings(facts)
    yield from (f"## {plain(headline)}", "", *bullets(others), "")
    finished = comparison.finished or "not finished"
    yield plain(f"{comparison.name}, {comparison.started} to {finished}")
    apart = "Faults that only a training script's own checks can notice"
    yield from titled("Scorecard", tables.scorecard(facts, facts.counted), rest=_REST)
    yield from titled(apart, tables.scorecard(facts, facts.apart) if facts.apart else None)
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
    skipped, families = list(comparison.skipped.items()), list(comparison.families.items())
    for title, shown in (
        ("Did not run", table(("stack", "why"), skipped)),
        ("Pair by pair", tables.every_ratio(facts)),
        ("Cost of one failure", tables.cost(facts)),
        ("While nothing fails", tables.at_rest(facts)),
        ("Witnesses", tables.witnesses(facts)),
        ("Kinds of fault", table(("fault", "what is done"), families)),
        ("Settings and versions", tables.settings(facts)),
    ):
        yield from titled(title, shown, most=1000, rest=_REST)
    notes = [f"{s.label}: {line}" for s in comparison.stacks for line in s.fidelity]
    if notes := [*comparison.fidelity, *notes]:
        yield from section("Differences from production")
        yield from bullets(notes)
    yield from section("Reproduce")
    yield from ("```sh", *code_lines(comparison.reproduce), "```")
    for name, rows in _systems(comparison):
        yield from section(name.capitalize())
        yield from bullets([f"{key}: {value}" for key, value in rows])


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
