"""Idle spares and false alarms of each stack while no fault acts: one table, for page and text."""

from __future__ import annotations

from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.compare.table import Column, Table, table, text
from trainchaos.reports.content.figures import alarms, percent

HEAD = (
    "stack",
    "ranks",
    "spares",
    "share that waits",
    "false alarms",
    "unfaulted rank-hours",
    "per rank-hour",
)


def rows(facts: ComparisonFacts) -> list[tuple[str, ...]]:
    """A row for each stack."""
    return [
        (one.label, str(one.ranks), str(one.spares), percent(one.share), *alarms(one.false_alarms))
        for one in facts.comparison.at_rest
    ]


def at_rest(facts: ComparisonFacts) -> Table:
    """The same rows for a page."""
    wide = ("stack", "per rank-hour")
    columns = [Column(name=name, kind="wide" if name in wide else "number") for name in HEAD]
    return table(
        "Stacks while nothing fails", columns, [[text(word) for word in row] for row in rows(facts)]
    )
