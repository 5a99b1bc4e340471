"""With ``determinism: elastic`` simulated runs end as the unfaulted one does, whatever was lost,
and are held to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.portions import first_in_test
from tests.support.search.simulate import KILL, cell_of, control_of, evidence, play
from trainchaos.harness.judge.checkers import CHECKERS
from trainchaos.harness.judge.checkers.job.loss import compare
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.rank.rank import SimRank
from trainchaos.harness.sim.rank.state import Reduced, ReduceInput, combine

TWO = [
    KILL,
    {
        "id": "too",
        "kind": "process-kill",
        "target": {"rank": 0},
        "at": {"step": 35, "phase": "collective"},
    },
]
STAY = {"strategy": "drop-replica", "params": {"rejoin": False}}


def judged(
    memory: Path, recovery: Any, *, seed: int = 3, behaviour: Behaviour | None = None, **more: Any
) -> tuple[str, dict[str, str]]:
    """How the result compares with the control arm's, and the checkers that did not pass."""
    cell = cell_of(recovery, more.pop("faults", [KILL]), **more)
    control = control_of(cell, seed=seed)
    faulted = play(cell, memory, seed=seed, behaviour=behaviour)
    assert faulted.outcome == "completed"
    shown = evidence(faulted, control)
    found = {name: check(shown) for name, check in CHECKERS.items()}
    return compare(shown)[0], {name: f.witness for name, f in found.items() if f.verdict != "pass"}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", first_in_test(5, 1))
@pytest.mark.parametrize("faults", [[KILL], TWO], ids=["one", "two"])
@pytest.mark.parametrize(
    "recovery", [{"strategy": "drop-replica"}, STAY, {"strategy": "hot-spare"}], ids=str
)
def test_the_result_is_the_unfaulted_runs(
    memory: Path, recovery: Any, faults: Any, seed: int
) -> None:
    assert judged(memory, recovery, faults=faults, seed=seed, determinism="elastic") == (
        "bit for bit",
        {},
    )


def test_without_it_the_result_depends_on_who_was_there(memory: Path) -> None:
    exactness, bad = judged(memory, STAY)
    assert (exactness, bad) == ("within the control band", {})


class AddsAsItComes(Behaviour):
    """Sums gradients rank by rank, without regard to their micro-batches."""

    def combine(self, rank: SimRank, parts: dict[int, ReduceInput]) -> Reduced:
        """Backwards, where ranks are missing."""
        return combine(parts if rank.world == 4 else dict(reversed(parts.items())))


def test_another_order_of_the_sums_is_found(memory: Path) -> None:
    exactness, bad = judged(memory, STAY, behaviour=AddsAsItComes(), determinism="elastic")
    assert exactness == "differs"
    assert list(bad) == ["loss-equality"], bad
