"""A small comparison with other people's stacks, driven for real: a killed rank and an
exception.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.result.model import Comparison, Trial

# nine arms of some 20 s
pytestmark = [pytest.mark.real, pytest.mark.stacks, pytest.mark.timeout(1200)]

FAMILIES = Path(__file__).parents[3] / "scenarios" / "compare"
# ours as it comes: the hang limit that was tuned, 0.05 s, is less than a step takes on a slow
# machine
OURS, RESTARTS, REPLICAS = "hot-spare default", "torchrun tuned", "torchft tuned"
REQUIRED = "stacks" in os.environ.get("CHAOS_REQUIRE", "").split(",")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Comparison]:
    """The comparison, played once."""
    state = environments.look("torchft")
    if not state.ready and REQUIRED:
        assert invoke(["stacks", "install", "torchft"]) == 0
    elif not state.ready:
        pytest.skip(f"torchft: {state.why}; chaos stacks install torchft")
    runs = tmp_path_factory.mktemp("runs")
    yield compared(runs, ["kill", "exception"], [OURS, RESTARTS, REPLICAS])


def compared(runs: Path, families: Sequence[str], labels: Sequence[str]) -> Comparison:
    """What ``chaos compare`` makes of these stacks."""
    words = ["compare", *(str(FAMILIES / f"{family}.yaml") for family in families), "--stacks"]
    words += [",".join(label.replace(" ", ":") for label in labels)]
    assert invoke([*words, "--runs", str(runs), "--name", "small"]) == 0
    for form in ("html", "md", "json"):
        assert (runs / "compare" / "small" / f"compare.{form}").stat().st_size > 1000
    return Comparison.model_validate_json((runs / "compare" / "small" / "compare.json").read_text())


@pytest.mark.smoke
def test_torchrun_begins_anew_where_a_spare_takes_over(tmp_path: Path) -> None:
    made = compared(tmp_path, ["kill"], [OURS, RESTARTS])
    assert made.missing == 0 and len(made.trials) == 2 and made.finished
    ours, restarts = trial(made, OURS, "kill"), trial(made, RESTARTS, "kill")
    assert (ours.outcome, ours.samples_lost, ours.steps_lost) == ("recovered", 0, 0), ours.witness
    assert restarts.outcome == "rolled back" and restarts.steps_lost > 0, restarts.witness


def trial(made: Comparison, label: str, family: str) -> Trial:
    """The only one of them."""
    (found,) = [one for one in made.trials if (one.label, one.family) == (label, family)]
    return found


@pytest.mark.parametrize("family", ["kill", "exception"])
def test_every_stack_survives_in_its_own_way(made: Comparison, family: str) -> None:
    ours, restarts, replicas = (trial(made, label, family) for label in (OURS, RESTARTS, REPLICAS))
    assert (ours.outcome, ours.samples_lost, ours.steps_lost) == ("recovered", 0, 0), ours.witness
    assert restarts.outcome == "rolled back" and restarts.steps_lost > 0, restarts.witness
    assert replicas.outcome in ("recovered", "degraded", "rolled back"), replicas.witness
    assert made.missing == 0 and len(made.trials) == 6 and made.finished
    times = [one.recovery or 0.0 for one in (ours, restarts, replicas)]
    assert all(0 < time < math.inf for time in times), times
    # seconds of imports against a state sent to a process that waits
    assert times[0] < times[1]
