"""The post-mortems of the page: a block for each incident, those that need a look open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.reports.content.figures import with_unit
from trainchaos.reports.content.postmortems import PostMortem
from trainchaos.reports.page.table import PageColumn, PageTable, mark, numeric, table

NAMES = {
    "first": "hit",
    "shown": "first signal",
    "blame": "blamed",
    "cheaper": "would have cost less",
    "reads as": "the log alone reads as",
    "to do": "recommended action",
    "warns": "warning",
    "waits": "collectives",
}
"""What the page calls a label of ``facts_of``; others keep their name."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One incident on the page; ``facts``: name and text, names of further lines of one kind are
    empty.
    """

    fault: str
    arm: str
    outcome: Markup
    summary: str
    facts: tuple[tuple[str, str], ...]
    timeline: PageTable
    open: bool


def blocks(found: Sequence[PostMortem]) -> list[Block]:
    """The blocks in the order given; open are those that did not end well."""
    return [_block(one) for one in found]


def _block(one: PostMortem) -> Block:
    named, before = list[tuple[str, str]](), ""
    for label, text in one.facts:
        named.append(("" if label == before else NAMES.get(label, label), text))
        before = label
    columns = (
        numeric("since the hit"),
        PageColumn(name="event", kind="wide"),
        PageColumn(name="who"),
    )
    return Block(
        fault=one.incident.fault,
        arm=one.account.arm,
        outcome=mark("pass" if one.ended_well else "fail", one.incident.outcome),
        summary=_summary(one),
        facts=tuple(named),
        timeline=table(columns, [list(moment) for moment in one.moments]),
        open=not one.ended_well,
    )


def _summary(one: PostMortem) -> str:
    said = [one.incident.kind]
    if one.account.right is not None:
        said.append("blamed rightly" if one.account.right else "an innocent was blamed")
    if one.account.rank_s:
        said.append(with_unit(one.account.rank_s, "rank-s", "lower"))
    return "; ".join(said)
