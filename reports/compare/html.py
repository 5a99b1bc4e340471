"""``compare.html``: a self-contained page that needs no network; its script only sorts tables."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from trainchaos.harness.compare.result.model import Comparison
from trainchaos.harness.compare.result.statistics import EVERY
from trainchaos.reports.compare import at_rest, lists, plots, tables
from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.compare.shapes import HATCHES, patterns
from trainchaos.reports.compare.words import findings
from trainchaos.reports.content.figures import flatten, number, pairs, plural
from trainchaos.reports.page.fill import TEMPLATES, fill

_MACHINE = ("processor", "cores", "memory_gib", "cuda_devices")


def render(comparison: Comparison) -> str:
    """The text of the page."""
    return fill("compare.html.j2", _context(comparison))


def _context(comparison: Comparison) -> dict[str, Any]:
    facts = ComparisonFacts(comparison)
    said = findings(facts)
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
    return {
        "css": _text("report.css") + _text("compare.css"),
        "script": _text("compare.js"),
        "comparison": comparison,
        "facts": facts,
        "headline": said[0],
        "findings": said[1:],
        "about": _about(comparison),
        "setup": _setup(comparison),
        "patterns": patterns(),
        "hatches": HATCHES,
        "scorecard": tables.scorecard(facts, facts.counted),
        "apart": tables.scorecard(facts, facts.apart) if facts.apart else None,
        "key": tables.key_of_outcomes(facts),
        "ratios": tables.ratios(facts),
        "pooled": EVERY if any(ratio.family == EVERY for ratio in comparison.ratios) else "",
        "panels": panels,
        "goodput": tables.goodput(facts),
        "cost": tables.cost(facts),
        "at_rest": at_rest.at_rest(facts),
        "price": _price(comparison),
        "witnesses": lists.witnesses(facts),
        "settings": lists.settings(facts),
        "fidelity": [(s.label, s.fidelity) for s in comparison.stacks if s.fidelity],
        "same": lists.same(facts),
        "trials": lists.trials(facts),
        "systems": [
            ("machine", flatten(comparison.machine)),
            ("workload", flatten(comparison.workload)),
        ],
    }


def _text(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _about(comparison: Comparison) -> str:
    """What was run, and when."""
    pairs = plural(len(comparison.trials), "pair") + " of arms"
    when = comparison.started + (
        f" to {comparison.finished}" if comparison.finished else ", not finished"
    )
    stacks = plural(
        len({stack.label for stack in comparison.stacks} & {t.label for t in comparison.trials}),
        "stack",
    )
    faults = plural(len(comparison.families), "kind") + " of fault"
    return f"{stacks} · {faults} · {pairs}, same seeds for each · {when}"


def _setup(comparison: Comparison) -> str:
    """The machine, and the training job."""
    machine = {k: v for k, v in comparison.machine.items() if k in _MACHINE and v not in ([], None)}
    parts = [pairs(machine), pairs(comparison.workload)]
    return "; ".join(part for part in parts if part)


def _price(comparison: Comparison) -> str:
    if comparison.price is None:
        return "No price of a GPU hour was given (--price), so hours only."
    return f"At {number(comparison.price)} {comparison.currency} for an hour of one GPU."
