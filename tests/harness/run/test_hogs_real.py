"""Ranks that share their processors with whatever else runs there: slow, and healthy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.loading.test_scenarios import loaded, simulate
from tests.support.hogs import URGENCIES, hogs
from trainchaos.chaos.events.log import Event, Kind, Log, read_log

pytestmark = [pytest.mark.real, pytest.mark.long]
SCENARIO = """\
version: 1
name: busy-machine
description: Nothing happens to the job but that it gets little of the processors.
seed: 1
workload: {kind: gpt, size: nano, ranks: 4, steps: 800, global_batch: 16,
  checkpoint: {every: 100, keep: 2}}
recovery: hot-spare
baseline: none
stop_conditions: [{when: "wall_time > 240s"}]
"""
POISONED = (12, 24, 36, 48)
"""Steps from which on one sample more gives NaN."""
FAULT = "{id: p%d, kind: poison-sample, target: {role: worker, select: all}, at: {step: %d}}"
POISON = f"""\
version: 1
name: poison-busy
description: Samples that nobody can compute are looked for, one by one, on busy processors.
seed: 1
workload: {{kind: gpt, size: nano, ranks: 4, steps: 60, global_batch: 128,
  checkpoint: {{every: 50, keep: 2}}}}
recovery: ${{matrix.recovery}}
matrix: {{recovery: [drop-replica, hot-spare]}}
faults: [{", ".join(FAULT % (step, step) for step in POISONED)}]
baseline: none
stop_conditions: [{{when: "no_committed_step_for > 120s"}}]
"""


@pytest.fixture(params=URGENCIES.values(), ids=URGENCIES)
def beside_hogs(request: pytest.FixtureRequest) -> Iterator[None]:
    with hogs(request.param):
        yield


def logs_of(scenario: str, folder: Path) -> list[Log]:
    """Of the arms of a scenario that is played here."""
    path = folder / "busy-machine.yaml"
    path.write_text(scenario)
    simulate(loaded(path), folder)
    return [read_log(events) for events in sorted(folder.rglob("events/*")) if events.is_dir()]


@pytest.mark.usefixtures("beside_hogs")
def test_nobody_is_taken_for_hung_on_a_busy_machine(tmp_path: Path) -> None:
    (log,) = logs_of(SCENARIO, tmp_path)
    assert any((event.step or 0) > 20 for event in log.of(Kind.STEP_COMMITTED))
    assert list(log.of(Kind.FAILURE_DETECTED)) == []


@pytest.mark.usefixtures("beside_hogs")
@pytest.mark.timeout(900)
def test_nobody_but_the_blamed_fails_where_a_sample_is_looked_for_on_a_busy_machine(
    tmp_path: Path,
) -> None:
    """The step is redone, then each blamed rank computes its share again, sample by sample, and
    nobody is killed.
    """
    logs = logs_of(POISON, tmp_path)
    assert len(logs) == 2
    for log in logs:
        skipped = [event.data["samples"] for event in log.of(Kind.SAMPLES_SKIPPED)]
        assert [len(samples) for samples in skipped] == [1] * len(POISONED), (
            "each was found, and alone"
        )
        failed = list(log.of(Kind.FAILURE_DETECTED))
        assert {event.data["cause"] for event in failed} == {"nonfinite"}, failed
        assert {about(event, event.data["rank"]) for event in failed} <= blamed(log)
        assert not [event for event in log.of(Kind.PROCESS_EXITED) if not event.data["expected"]]
        assert [event.data["outcome"] for event in log.of(Kind.RUN_FINISHED)] == ["completed"]


def blamed(log: Log) -> set[tuple[int, int]]:
    """By the ranks themselves."""
    return {
        about(event, rank)
        for event in log.of(Kind.NONFINITE_CAUGHT)
        for rank in event.data["blamed"]
    }


def about(event: Event, rank: int) -> tuple[int, int]:
    """Which rank, in which generation."""
    return event.generation, rank
