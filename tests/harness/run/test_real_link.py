"""Real processes whose connections go through the proxy, whose store is a process, whose
coordinator is lost.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.support.decided import decided
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.results import Results

ROOT = Path(__file__).parents[3]
SCENARIOS = ROOT / "scenarios"


def run(name: str, folder: Path, *options: str) -> tuple[int, Results, list[Event]]:
    """Exit code, results, and the orchestrator's log of the faulted arm."""
    path = next(SCENARIOS.rglob(f"{name}.yaml"))
    code = decided(path, folder, ("-q", *options))
    latest = folder / name / "latest"
    results = Results.model_validate_json((latest / "results.json").read_text())
    log = min(latest.glob("events/*faulted/orchestrator.jsonl"))  # where it was played twice
    return code, results, EventLogTail(log).read()


def landed(events: list[Event], fault: str) -> dict[str, Any]:
    """The evidence of a fault."""
    return next(
        dict(e.data["evidence"])
        for e in events
        if e.kind is Kind.FAULT_LANDED and e.data["fault"] == fault
    )


@pytest.mark.real
@pytest.mark.long
def test_a_partition_longer_than_a_hang_is_nobodys_fault_and_costs_no_rank(tmp_path: Path) -> None:
    code, results, events = run("long-partition", tmp_path)
    assert code == 0, results.reason
    evidence = landed(events, "partition")
    assert evidence["measured_round_trip_s"] is None, "nothing came through"
    assert [e.data["process"] for e in events if e.kind is Kind.FAILURE_DETECTED] == [None]
    members = [e.data["members"] for e in events if e.kind is Kind.GENERATION_STARTED]
    assert members[0] == members[-1]


@pytest.mark.real
@pytest.mark.long
def test_a_delay_is_measured_by_a_probe_and_felt_by_the_job(tmp_path: Path) -> None:
    _, results, events = run("delay-one-way", tmp_path)
    evidence = landed(events, "link-delay")
    assert evidence["measured_round_trip_s"] >= 0.012
    assert evidence["collective_grew_ms"] >= 7.5
    assert results.faults[0].outcome == "masked", results.reason
    failed = {
        name for cell in results.cells for name, f in cell.invariants.items() if f.verdict != "pass"
    }
    assert failed <= {"liveness"}, "on a busy machine the rate of the last steps may be lower"


@pytest.mark.real
@pytest.mark.long
def test_a_store_lost_while_a_group_forms_costs_one_more_attempt(tmp_path: Path) -> None:
    code, results, events = run("store-kill-in-recovery", tmp_path)
    assert code == 0, results.reason
    evidence = landed(events, "store")
    assert evidence["reaped_signal"] == 9 and evidence["next_port"]
    blamed = [
        e.data["process"] for e in events if e.kind is Kind.FAILURE_DETECTED and e.data["process"]
    ]
    assert len(blamed) == 1, "nobody but the rank that was killed"


@pytest.mark.real
@pytest.mark.long
def test_ranks_train_on_without_a_coordinator_and_another_takes_over(tmp_path: Path) -> None:
    code, results, events = run("coordinator-kill", tmp_path)
    assert code == 0, results.reason
    assert landed(events, "coordinator")["steps_committed_meanwhile"] >= 1
    assert [e.seq for e in events] == list(range(len(events)))


@pytest.mark.real
@pytest.mark.long
def test_a_healthy_rank_declared_dead_commits_nothing_more(tmp_path: Path) -> None:
    code, results, events = run("lost-heartbeat", tmp_path)
    assert code == 0, results.reason
    blamed = next(e for e in events if e.kind is Kind.FAILURE_DETECTED)
    (log,) = tmp_path.glob(f"lost-heartbeat/latest/events/*faulted/{blamed.data['process']}.jsonl")
    own = [e for e in EventLogTail(log).read() if e.kind is Kind.STEP_COMMITTED]
    assert any(e.time_ns < blamed.time_ns for e in own)
    ready = next(
        e for e in events if e.kind is Kind.GENERATION_READY and e.time_ns > blamed.time_ns
    )
    assert not [e for e in own if e.time_ns > ready.time_ns]


@pytest.mark.slow
def test_nothing_in_the_recovery_stack_depends_on_the_wall_clock() -> None:
    """Wall time is only ever written down for people: in a log's first line, in a
    directory's name.
    """
    found = []
    for path in (ROOT / "recovery").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            wall = isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "time.time",
                "time.time_ns",
            )
            if wall or (
                isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today")
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    lines = {
        place: (ROOT / place.split(":")[0]).read_text().splitlines()[int(place.split(":")[1]) - 1]
        for place in found
    }
    for_people = (
        "wall_ns=time.time_ns()",
        'f"recovery-{datetime.now(UTC)',
        "return known.active(datetime.now(UTC))",  # a taint expires at a time of the calendar
        "since = datetime.now(UTC)",  # and begins at one
    )
    assert all(any(allowed in line for allowed in for_people) for line in lines.values()), lines
