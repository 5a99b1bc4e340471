"""The corpus of spoilt logs (``tests/mutations``): every mutation gets its verdict, and every
checker is needed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.bases import MAKERS, base, judged
from tests.mutations.page import listed
from tests.mutations.tables import all_mutations
from tests.mutations.tape import Mutation
from trainchaos.chaos.scenario.model import RETIRED_INVARIANTS
from trainchaos.harness.judge.checkers import (
    BY_NAME,
    CHECKERS,
    EXPECTATION,
    FINISHED,
    OF_COMMANDS,
    OTHERWISE_OF_COMMANDS,
    STEADY_STATE,
)
from trainchaos.harness.judge.checkers.job.observed import PROGRESS
from trainchaos.harness.judge.results import merge

LEAST = 150
OF_BASE = {"script": 25, "agents": 8, "compare": 20}
CORPUS = all_mutations()
WITH_OTHERS = "evidence-complete"
"""What is not whole is inconclusive for all others too."""
REGISTERED = [
    *(
        (name, None)
        for name in (
            *CHECKERS,
            *OF_COMMANDS,
            *BY_NAME,
            PROGRESS,
            EXPECTATION,
            STEADY_STATE,
            FINISHED,
        )
        if name != WITH_OTHERS
    ),
    *((name, of_command) for name in OTHERWISE_OF_COMMANDS for of_command in (False, True)),
]
"""Checkers, and whether of a command: some judge one by other evidence. None: all the same."""


def not_green(name: str, mutation: Mutation | None = None) -> dict[str, str]:
    """Checkers that do not pass a base."""
    return {
        n: f"{f.verdict}: {f.witness}"
        for n, f in judged(name, mutation).items()
        if f.verdict != "pass"
    }


def is_command(name: str) -> bool:
    """Whether a base is of a command."""
    return base(name).cell.scenario.workload.command is not None


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MAKERS)
def test_a_base_is_good(name: str) -> None:
    assert not_green(name) == {}


@pytest.mark.parametrize("mutation", CORPUS, ids=repr)
def test_it_is_seen(mutation: Mutation) -> None:
    findings = judged(mutation.base, mutation)
    said = {name: findings[name].verdict for name in mutation.seen}
    assert said == mutation.seen, not_green(mutation.base, mutation)
    due = merge([findings[name].verdict for name in mutation.seen])
    assert merge([finding.verdict for finding in findings.values()]) in (due, "fail")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("checker", "of_command"), REGISTERED)
def test_every_checker_sees_something_that_no_other_sees(
    checker: str, of_command: bool | None
) -> None:
    bases = {name for name in MAKERS if of_command in (None, is_command(name))}
    mine = [mutation for mutation in CORPUS if checker in mutation.seen and mutation.base in bases]
    mine.sort(key=lambda mutation: len(mutation.seen))  # most likely alone first
    alone = next((m for m in mine if set(not_green(m.base, m)) == {checker}), None)
    assert alone is not None, f"{checker}: none of {mine} is seen by it alone"


def test_there_are_enough_and_names_are_unique() -> None:
    assert len(CORPUS) >= LEAST
    counts = Counter(mutation.base for mutation in CORPUS)
    assert {base: counts[base] for base in OF_BASE if counts[base] < OF_BASE[base]} == {}
    assert [name for name, count in Counter(m.name for m in CORPUS).items() if count > 1] == []
    assert {mutation.base for mutation in CORPUS} <= set(MAKERS)


def test_the_page_names_every_checker_and_the_list_every_mutation() -> None:
    page = Path("docs/verdicts.md").read_text()
    assert all(f"`{name}`" in page for name in (*CHECKERS, *RETIRED_INVARIANTS))
    assert listed(CORPUS).count("\n- ") == sum(len(mutation.seen) for mutation in CORPUS)


def test_finished_is_what_is_said_without_liveness() -> None:
    assert FINISHED not in CHECKERS
