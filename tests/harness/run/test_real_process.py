"""Process faults on real processes: each lands, is detected as what it is, and is
recovered from.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.run.test_real import GPT, MLP, run
from tests.support.decided import unpassed
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import Results
from trainchaos.harness.launch.cgroups import lacks_cgroup
from trainchaos.harness.undo.ledger import read_open

pytestmark = pytest.mark.real

AT = "target: {rank: 2}, at: {step: 20, phase: forward}"


def play(
    tmp_path: Path, kind: str, recovery: str, *, params: str = "{}", more: str = ""
) -> tuple[int, Results]:
    """Run one fault of that kind under one strategy."""
    fault = f"[{{id: f, kind: {kind}, params: {params}, {AT}{', ' + more if more else ''}}}]"
    return run(tmp_path, workload=MLP, recovery=recovery, faults=fault)


def only(results: Results) -> Incident:
    """The one incident, in a run whose checkers all agree."""
    assert unpassed(results) == {}
    (incident,) = results.faults
    assert incident.landed and incident.healed
    return incident


@pytest.mark.long
@pytest.mark.parametrize(
    "recovery",
    [
        pytest.param("checkpoint-restart", marks=pytest.mark.long),
        pytest.param("drop-replica", marks=pytest.mark.long),
        "hot-spare",
    ],
)
def test_a_notice_is_used_to_leave_without_losing_a_step(tmp_path: Path, recovery: str) -> None:
    code, results = play(tmp_path, "process-term", recovery, params="{grace_s: 120}")
    assert code == 0, results.reason
    incident = only(results)
    assert (incident.detected_by, incident.blamed_rank) == ("notice", 2)
    assert (incident.outcome, incident.steps_lost) == ("recovered", 0)
    assert incident.recovery_time is not None and incident.recovery_time < 120, "before the kill"


@pytest.mark.long
def test_an_unheeded_notice_ends_in_a_kill(tmp_path: Path) -> None:
    code, results = play(tmp_path, "process-term", "none", params="{grace_s: 0.05}")
    assert code == 1
    (incident,) = results.faults
    assert (incident.landed, incident.outcome) == (True, "fail-stop")


@pytest.mark.long
def test_a_segmentation_fault_is_one(tmp_path: Path) -> None:
    code, results = play(tmp_path, "process-segv", "hot-spare")
    assert code == 0, results.reason
    incident = only(results)
    assert (incident.evidence, incident.detected_by) == ({"signal": 11}, "exit")


@pytest.mark.long
def test_a_held_interpreter_is_found_as_a_hang_and_killed(tmp_path: Path) -> None:
    code, results = play(tmp_path, "gil-deadlock", "hot-spare", params="{hold_s: 300}")
    assert code == 0, results.reason
    incident = only(results)
    assert (incident.detected_by, incident.blamed_rank, incident.outcome) == (
        "hang",
        2,
        "recovered",
    )
    assert incident.recovery_time is not None and incident.recovery_time < 300, (
        "it is not waited for"
    )


@pytest.mark.long
def test_a_left_out_collective_is_blamed_on_the_rank_that_left_it_out(tmp_path: Path) -> None:
    code, results = play(tmp_path, "collective-skip", "drop-replica")
    assert code == 0, results.reason
    incident = only(results)
    assert (incident.detected_by, incident.blamed_rank) == ("hang", 2)
    assert "without entering collective" in str(incident.evidence["seen"])


@pytest.mark.long
def test_a_crash_loop_ends_with_a_clear_word(tmp_path: Path) -> None:
    code, results = play(
        tmp_path,
        "crash-loop",
        "{strategy: hot-spare, spares: 4}",
        more="expect: {outcome: fail-stop}",
    )
    assert code == 0, results.reason  # as expected
    assert [incident.outcome for incident in results.faults] == ["fail-stop"] * 4
    (arm,) = [arm for arm in results.arms if arm.arm == "faulted"]
    assert arm.reason.startswith("rank 2 died 4 times in a row at step 20: ")


@pytest.mark.long
@pytest.mark.skipif(lacks_cgroup() is not None, reason=f"no control groups: {lacks_cgroup()}")
def test_the_kernel_kills_for_memory_and_the_group_is_removed(tmp_path: Path) -> None:
    code, results = play(tmp_path, "oom-kill", "hot-spare", params="{spare_mib: 24}")
    assert code == 0, results.reason
    incident = only(results)
    assert (incident.evidence, incident.outcome) == ({"signal": 9, "oom_kills": 1}, "recovered")
    ledger = (tmp_path / "runs/real/latest/ledger.jsonl").read_text()
    groups = [Path(path) for path in re.findall(r'"path":"(/sys/fs/cgroup[^"]*)"', ledger)]
    assert groups and not any(path.exists() for path in groups)
    assert not [
        e for e in read_open(tmp_path / "runs/real/latest/ledger.jsonl") if "cgroup" in str(e.undo)
    ]


@pytest.mark.skipif(lacks_cgroup() is not None, reason=f"no control groups: {lacks_cgroup()}")
@pytest.mark.long
def test_a_quota_slows_a_rank_and_its_group_is_removed_though_the_rank_dies_in_it(
    tmp_path: Path,
) -> None:
    slow = (
        "{id: slow, kind: straggler, params: {factor: 3, mode: cgroup-quota}, target: {rank: 2}, "
        "at: {step: 8}, duration: {steps: 25}}"
    )
    kill = "{id: kill, kind: process-kill, target: {rank: 2}, at: {step: 22}}"
    code, results = run(tmp_path, workload=GPT, recovery="hot-spare", faults=f"[{slow}, {kill}]")
    assert code == 0, results.reason
    by_id = {incident.fault: incident for incident in results.faults}
    assert by_id["slow"].landed and by_id["slow"].healed
    ledger = (tmp_path / "runs/real/latest/ledger.jsonl").read_text()
    groups = [Path(path) for path in re.findall(r'"path":"(/sys/fs/cgroup[^"]*)"', ledger)]
    assert len(groups) >= 1 and not any(path.exists() for path in groups)
