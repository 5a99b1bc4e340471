"""Scripts with points of their own, for real: killed, stopped and told to fail in the middle of a
step; and judged.
"""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.harness.script.test_script import command, events, run, write
from tests.harness.script.test_script_observer import COMMAND, Job, S, begun
from tests.harness.script.test_script_sustained import incident_of, inject
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.scenario.schema import scenario_schema
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.script.listen.progress import ProgressReport

POINTED = ("--steps", "30", "--restarts", "3", "--beacon", "--points")
CATALOGUE = build_catalogue()


def play(
    tmp_path: Path, *faults: str, options: tuple[str, ...] = (), **more: Any
) -> dict[str, Incident]:
    """Fault -> what became of it; every fault landed, and the checkers have nothing to say."""
    scenario = write(
        tmp_path / "s.yaml",
        command(*POINTED, *options),
        fault=", ".join(faults),
        progress="beacon",
        workload="  points: true",
        **more,
    )
    code, results = run(tmp_path, scenario)
    assert code == 0, results.reason
    return {incident.fault: incident for incident in results.faults}


def reached(tmp_path: Path, step: int) -> list[int]:
    """Steps that were reported in the generation of the fault before it was injected at
    ``step``.
    """
    (injected,) = events(tmp_path, Kind.FAULT_INJECTED)
    assert injected.step == step
    reports = events(tmp_path, Kind.STEP_REPORTED)
    return [e.step or 0 for e in reports if e.time_ns < injected.time_ns]


# ---- for real


@pytest.mark.real
def test_a_rank_is_killed_where_it_holds(tmp_path: Path) -> None:
    kill = "{id: hit, kind: process-kill, target: {rank: 1}, at: {step: 12, phase: backward}}"
    incident = play(tmp_path, kill)["hit"]
    assert (incident.outcome, incident.witness) == ("recovered", "kernel: wait status")
    assert (incident.detected_by, incident.blamed_rank, incident.steps_lost) == ("exit", 1, 1)
    assert max(reached(tmp_path, 12)) == 11  # it never came to the end of the step


@pytest.mark.long
@pytest.mark.real
def test_a_rank_is_killed_in_the_middle_of_its_save(tmp_path: Path) -> None:
    kill = "{id: hit, kind: process-kill, target: {rank: 0}, at: {step: 15, phase: checkpoint}}"
    incident = play(tmp_path, kill)["hit"]
    assert incident.outcome == "recovered" and incident.restored_step == 10
    assert max(reached(tmp_path, 15)) == 15


@pytest.mark.long
@pytest.mark.real
def test_an_exception_ends_a_process(tmp_path: Path) -> None:
    expect = "expect: {outcome: recovered, detected_by: error}"
    fault = f"{{id: hit, kind: exception, target: {{rank: 1}}, at: {{step: 12}}, {expect}}}"
    incident = play(tmp_path, fault)["hit"]
    assert incident.witness in ("script: its own word", "process: the error it printed")
    assert incident.blamed_rank == 1 and incident.evidence["script"] == "raise"
    (scratch,) = (tmp_path / "runs/script/latest/logs").glob("*faulted*/output.log")
    assert "RuntimeError: injected by chaos: injected failure (step 12)" in scratch.read_text()
    printed = [e.data["evidence"].get("output", "") for e in events(tmp_path, Kind.FAULT_EFFECT)]
    assert any("injected by chaos" in line for line in printed)
    exits = [
        (e.data["exit_code"], e.data["process"]) for e in events(tmp_path, Kind.PROCESS_EXITED)
    ]
    assert (1, "w1") in exits


@pytest.mark.real
@pytest.mark.long
def test_an_exception_that_is_caught_costs_little_and_is_measured(tmp_path: Path) -> None:
    fault = "{id: hit, kind: exception, target: {rank: 1}, at: {step: 12, phase: backward}}"
    incident = play(tmp_path, fault, options=("--retry",))["hit"]
    assert (incident.outcome, incident.detected_by, incident.steps_lost) == (
        "recovered",
        "error",
        0,
    )
    assert len(events(tmp_path, Kind.COMMAND_STARTED)) == 1


@pytest.mark.real
def test_nan_that_is_trained_on_is_an_escape(tmp_path: Path) -> None:
    fault = (
        "{id: hit, kind: tensor-corrupt, target: {rank: 1}, at: {step: 12}, expect: {outcome:"
        " sdc-escape}}"
    )
    incident = play(tmp_path, fault, baseline="paired")["hit"]
    assert incident.witness == "script: its own word" and incident.recovery_time == math.inf
    assert incident.evidence == {
        "script": "nan",
        "before": 0.0,
        "after": "nan",
        "committed_step": 12,
        "committed_loss": "nan",
    }
    assert incident.detection_time == math.inf


@pytest.mark.real
@pytest.mark.long
def test_a_point_that_the_script_lacks_is_said(tmp_path: Path) -> None:
    fault = "{id: hit, kind: process-kill, target: {rank: 1}, at: {step: 12, phase: backward}}"
    scenario = write(
        tmp_path / "s.yaml",
        command("--steps", "30", "--beacon"),
        fault=fault,
        progress="beacon",
        workload="  points: true",
    )
    code, results = run(tmp_path, scenario)
    assert code == 3 and "no rank it was for reached its point" in results.reason


# ---- judged


@pytest.fixture
def job() -> Job:
    made = begun()
    for step in range(1, 31):
        made.train(step, rank=0)
        made.train(step, rank=1)
    return made


def raised(job: Job) -> None:
    job.now += S // 100
    inject(job, "exception", step=31)
    job.observer.on_error("w1", "it raised", job.now)


def test_who_raised_and_reports_again_has_recovered(job: Job) -> None:
    raised(job)
    job.train(31, rank=1)
    job.train(*range(31, 101), rank=0)
    job.train(*range(96, 101), rank=1)
    incident = incident_of(job)
    assert job.causes() == ["start", "resumed"] and job.failures() == [("error", "w1")]
    assert (incident.outcome, incident.first_new_step, incident.steps_lost) == ("recovered", 31, 0)
    assert incident.recovery_time == pytest.approx(0.1)


def test_a_step_that_others_reported_first_is_not_lost(job: Job) -> None:
    raised(job)
    job.train(31, rank=0)
    job.train(31, rank=1)
    job.train(*range(32, 101), rank=0)
    job.train(*range(96, 101), rank=1)
    incident = incident_of(job)
    assert (incident.outcome, incident.first_new_step, incident.steps_lost) == ("recovered", 32, 0)


def test_who_raised_and_went_back_lost_its_steps(job: Job) -> None:
    raised(job)
    for step in range(21, 101):
        job.train(step, rank=1)
        job.train(step, rank=0)
    incident = incident_of(job)
    assert job.causes() == ["start", "rollback"]
    assert (incident.steps_lost, incident.restored_step, incident.first_new_step) == (10, 20, 31)


def test_the_step_in_flight_of_others_is_no_recovery(job: Job) -> None:
    raised(job)
    job.train(31, rank=0)
    assert job.causes() == ["start"]
    job.exit("w1", code=1)
    assert job.failures() == [("error", "w1")]  # its end is no second failure
    job.train(32, rank=0)
    assert job.causes() == ["start", "shrunk"]


def spoilt(job: Job, *steps: int) -> None:
    """Steps with a loss that is no number."""
    for step in steps:
        job.now += S // 10
        job.observer.on_progress(ProgressReport(step=step, rank=0, loss=math.nan), job.now)


def test_a_bad_loss_that_is_taken_back_is_none(job: Job) -> None:
    inject(job, "tensor-corrupt", step=31)
    spoilt(job, 31, 32)
    job.exit("w1", code=1)
    job.exit("w0", code=1)
    job.found("w2", "w3")
    job.train(*range(21, 101))
    incident = incident_of(job)
    assert (incident.outcome, incident.restored_step) == ("recovered", 20)


def test_a_job_that_ends_by_a_bad_loss_has_not_gone_on(job: Job) -> None:
    inject(job, "tensor-corrupt", step=31)
    spoilt(job, 31)
    job.exit("w1", signum=signal.SIGABRT)
    assert incident_of(job, "gave-up").outcome == "fail-stop"


# ---- read


def complaint(tmp_path: Path, fault: str, points: str = "true") -> str:
    """The first line of what is wrong; empty when nothing is."""
    write(tmp_path / "s.yaml", COMMAND["command"], fault=fault, workload=f"  points: {points}")
    try:
        load(tmp_path / "s.yaml", CATALOGUE)
    except ScenarioError as error:
        return str(error)
    return ""


AT = "target: {rank: 1}, at: {step: 12"


@pytest.mark.parametrize(
    "fault",
    [
        f"id: a, kind: process-kill, {AT}, phase: checkpoint}}",
        f"id: a, kind: process-stop, {AT}, phase: any}}",
        f"id: a, kind: process-term, {AT}, phase: collective}}",
        f"id: a, kind: exception, {AT}}}",
        f"id: a, kind: tensor-corrupt, params: {{op: nan}}, {AT}}}",
        "id: a, kind: exception, at: {time: 1s}",
    ],
)
def test_what_a_script_with_points_takes(tmp_path: Path, fault: str) -> None:
    assert complaint(tmp_path, f"{{{fault}}}") == ""
    if "phase" in fault or "process" not in fault:
        assert "workload.points: true" in complaint(tmp_path, f"{{{fault}}}", "false")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            f"id: a, kind: tensor-corrupt, params: {{op: inf}}, {AT}}}",
            "a script can do only surface: gradient with op",
        ),
        (
            f"id: a, kind: tensor-corrupt, params: {{surface: loss}}, {AT}}}",
            "a script can do only surface: gradient",
        ),
        (
            f"id: a, kind: straggler, params: {{factor: 2}}, duration: 1s, {AT}}}",
            "straggler cannot be done to a command",
        ),
        (f"id: a, kind: process-kill, {AT}, phase: sideways}}", "sideways"),
        (
            "id: a, kind: disk-full, duration: 1s, at: {step: 12, phase: backward}",
            "acts on no rank that could hold",
        ),
        (
            f"id: a, kind: process-kill, {AT}}}, expect: {{detected_by: nonfinite}}",
            "seen as exit or hang or error",
        ),
    ],
)
def test_what_it_does_not_take(tmp_path: Path, fault: str, message: str) -> None:
    assert message in complaint(tmp_path, f"{{{fault}}}")


@pytest.mark.parametrize(
    ("value", "fits"), [(True, True), (False, True), (3, False), ("please", False)]
)
def test_the_schema_knows_points(value: object, fits: bool) -> None:
    workload = {"command": ["train"], "ranks": 1, "steps": 9, "points": value}
    scenario = {"version": 1, "name": "x", "workload": workload}
    assert jsonschema.Draft202012Validator(scenario_schema(CATALOGUE)).is_valid(scenario) is fits
