"""``scenarios/real-jobs`` with real processes, all cells: what a long run does besides training,
and a kill in it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.loading.test_scenarios import FOLDER, loaded
from tests.support.decided import decided, unpassed
from trainchaos.chaos.events.log import Event, Kind, read_log
from trainchaos.harness.judge.results import CellResult, Results

pytestmark = [pytest.mark.real, pytest.mark.long]
FILES = sorted((FOLDER / "real-jobs").glob("*.yaml"))
EXACT = {
    "checkpoint-restart": {"bit for bit"},
    # fewer ranks add up in another order
    "drop-replica": {"bit for bit", "within the control band"},
    "hot-spare": {"bit for bit"},
}


def failures(folder: Path) -> list[Event]:
    """What an arm took for a failure."""
    return [event for event in read_log(folder).events if event.kind is Kind.FAILURE_DETECTED]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_strategy_recovers_and_nobody_else_is_blamed(path: Path, tmp_path: Path) -> None:
    scenario = loaded(path)
    code = decided(path, tmp_path)
    latest = tmp_path / path.stem / "latest"
    results = Results.model_validate_json((latest / "results.json").read_text())
    assert code == 0 and not unpassed(results), results.reason
    assert not results.skipped and [cell.id for cell in results.cells] == [
        cell.id for cell in scenario.cells
    ]
    assert {cell.strategy for cell in results.cells} == set(EXACT)
    for cell in results.cells:
        recovered(cell, results)
    assert len(results.arms) == 2 * len(results.cells)
    for arm in results.arms:
        blamed = [
            (event.data["cause"], event.data["rank"]) for event in failures(latest / arm.events)
        ]
        killed = [
            i.target["rank"] for i in results.faults if i.cell == arm.cell and i.fault == "kill"
        ]
        assert blamed == ([("exit", rank) for rank in killed] if arm.arm == "faulted" else []), (
            arm.id
        )


def recovered(cell: CellResult, results: Results) -> None:
    """The kill is recovered from, all else costs nobody anything, and the result is that of the
    control arm.
    """
    assert cell.exactness in EXACT[cell.strategy], cell.id
    assert cell.metrics["samples_lost"].values == [0.0], cell.id
    incidents = [incident for incident in results.faults if incident.cell == cell.id]
    assert all(incident.landed and incident.healed for incident in incidents)
    (kill,) = [incident for incident in incidents if incident.fault == "kill"]
    assert (kill.outcome, kill.detected_by) == ("recovered", "exit")
    assert kill.recovery_time is not None
    assert sum(phase.seconds for phase in kill.phases) == pytest.approx(
        kill.recovery_time, abs=1e-6
    )
    assert {incident.outcome for incident in incidents if incident is not kill} <= {"masked"}
