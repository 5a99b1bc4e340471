"""How often ``chaos explain`` is right: a corpus of crash texts, and its table in the docs."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainchaos.recovery.playbook.book import match_text
from trainchaos.recovery.playbook.entry import Action, Cause, Entry, Owner, Tells

CORPUS = Path(__file__).with_name("corpus.toml")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "explain.md"
NAMES_NOTHING = frozenset({Cause.UNCLEAR, Cause.NONE, Cause.PEER})
"""Causes that accuse nobody: said of a text whose cause is not known, they are right."""
LEAST, LEAST_RIGHT, MOST_FALSE = 150, 0.9, 0.02
HEAD = "| family | texts | right | false |\n| --- | --- | --- | --- |"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A crash text and what is right. ``truth``: cause, owner, action; None: not known from it."""

    id: str
    family: str
    text: str
    truth: tuple[Cause, Owner, Action] | None
    source: str
    round: int

    @property
    def first(self) -> Entry | None:
        """What is said first."""
        found = match_text(self.text.splitlines())
        return found[0].entry if found else None

    @property
    def accuses(self) -> bool:
        """Whether a cause is named."""
        said = self.first
        return (
            said is not None and said.tells is not Tells.EFFECT and said.cause not in NAMES_NOTHING
        )

    @property
    def right(self) -> bool:
        """Whether cause, owner and action are; or none is named where none is known."""
        said = self.first
        if self.truth is None:
            return not self.accuses
        return said is not None and (said.cause, said.owner, said.action) == self.truth

    @property
    def false(self) -> bool:
        """Whether a cause is named that it is not. That nothing is known is not false."""
        said = self.first
        return self.accuses and (self.truth is None or said is None or said.cause != self.truth[0])


def cases() -> list[Case]:
    """The corpus."""
    return [
        Case(
            id=row["id"],
            family=row["family"],
            text=row["text"],
            truth=(Cause(row["cause"]), Owner(row["owner"]), Action(row["action"]))
            if "cause" in row
            else None,
            source=row["source"],
            round=row.get("round", 0),
        )
        for row in tomllib.loads(CORPUS.read_text())["case"]
    ]


CASES = cases()


def row(name: str, of: Iterable[Case]) -> str:
    """A line of the table."""
    all_of = list(of)
    right, false = sum(one.right for one in all_of), sum(one.false for one in all_of)
    return f"| {name} | {len(all_of)} | {right} | {false} |"


def table() -> str:
    """Families with a mistake, the largest first, and all."""
    sizes = Counter(one.family for one in CASES)
    wrong = {one.family for one in CASES if not one.right}
    order = sorted(wrong, key=lambda name: (-sizes[name], name))
    lines = [row(name, (one for one in CASES if one.family == name)) for name in order]
    return "\n".join([HEAD, *lines, row("all", CASES)])


def test_the_corpus_is_large_and_each_text_has_a_source() -> None:
    assert len(CASES) >= LEAST and len({one.id for one in CASES}) == len(CASES)
    sources = [one.source for one in CASES]
    assert all(one.startswith("https://") for one in sources)
    code = [one for one in sources if one.startswith("https://github.com/")]
    assert all(re.search(r"/(?:issues|pull)/\d+$", one) for one in code), (
        "a repository and a number"
    )
    assert len({one.text for one in CASES}) == len(CASES)


def test_the_first_answer_is_right_and_seldom_false() -> None:
    wrong = [f"{one.id}: {one.first and one.first.id}" for one in CASES if not one.right]
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(CASES), wrong
    false = [f"{one.id}: {one.first and one.first.id}" for one in CASES if one.false]
    assert len(false) <= MOST_FALSE * len(CASES), false


@pytest.mark.parametrize(
    "case", [one for one in CASES if one.family == "shown"], ids=lambda c: c.id
)
def test_a_case_that_was_reported_is_right(case: Case) -> None:
    assert case.right, case.first and case.first.id


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), table()
