"""What a scenario requires and this machine lacks: skipped with every reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.search.simulate import KILL, cell_of
from trainchaos.chaos.scenario.model import Requires
from trainchaos.harness.launch.capabilities import PROBES, too_small, unmet


def no() -> str | None:
    return "not here"


def test_all_that_is_missing_is_named_and_nothing_else() -> None:
    probes = {"root": no, "docker": no, "mount": lambda: None}
    assert unmet(Requires(), probes) is None
    assert unmet(Requires(mount=True), probes) is None
    assert (
        unmet(Requires(root=True, docker=True), probes)
        == "requires root: not here; requires docker: not here"
    )


def test_every_capability_of_the_format_has_a_probe() -> None:
    flags = {name for name, field in Requires.model_fields.items() if field.annotation is bool}
    assert set(PROBES) == flags


@pytest.mark.parametrize("name", sorted(PROBES))
def test_probes_answer_on_any_machine(name: str) -> None:
    answer = PROBES[name]()
    assert answer is None or answer.strip()


def test_too_few_ranks() -> None:
    def cell(ranks: int) -> Any:
        return cell_of("hot-spare", [KILL], ranks=ranks, requires={"world_size": 6})

    assert too_small(cell(6)) is None
    assert too_small(cell(4)) == "requires world_size 6, this cell has 4 ranks"
