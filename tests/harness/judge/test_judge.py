"""Whole run directories, from event files to ``results.json``."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support import arms, logs
from tests.support.arms import KILL, cell_of
from tests.support.clusters.nodelogs import HOURS_NS, Clock, on_nodes
from tests.support.logs import Script
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.model import Cell, ResolvedRun, SkippedCell
from trainchaos.harness.host.rundir import RunDirectory, arm_id, create_run, write_resolved
from trainchaos.harness.judge.checkers import CHECKERS
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.measure.samples import chances
from trainchaos.harness.judge.results import Results, SlaResult
from trainchaos.harness.judge.verdict.judge import judge, write_results

SLA = {
    "recovery_time": ["median < 2s", "max < 5s"],
    "steps_lost": ["max <= 25"],
    "goodput": ["min >= 0.1"],
}

SLOW = {**KILL, "id": "slow", "kind": "straggler", "params": {"factor": arms.SLOWER}}


def make_run(
    base: Path, cells: list[Cell], arms: dict[str, Script], skipped: list[SkippedCell] | None = None
) -> RunDirectory:
    """A stored run with these arms' logs."""
    run = create_run(base, "synthetic", 17, datetime(2026, 1, 2, tzinfo=UTC))
    resolved = ResolvedRun(
        run_id=run.root.name,
        source="scenarios/synthetic.yaml",
        started="2026-01-02T00:00:00Z",
        reproduce="chaos run scenarios/synthetic.yaml --seed 17",
        seed=17,
        cells=cells,
        skipped=skipped or [],
        sla_lines={"recovery_time": [14, 15]},
    )
    write_resolved(run, resolved)
    for name, script in arms.items():
        run.make_arm(name)
        script.save(run.events(name))
    return run


def simple(tmp_path: Path, script: Script | None = None, **more: Any) -> RunDirectory:
    """One cell, one repeat, hot-spare."""
    fields = {"recovery": "hot-spare", "faults": [KILL], "sla": SLA, **more}
    strategy = fields.pop("recovery")
    cell = cell_of(strategy, fields.pop("faults"), **fields)
    pair = {
        arm_id("default", 0, "faulted"): script or arms.hot_spare(),
        arm_id("default", 0, "control"): arms.control(
            strategy, spares=int(strategy == "hot-spare")
        ),
    }
    return make_run(tmp_path, [cell], pair)


def _first(results: Results, metric: str) -> SlaResult:
    return next(sla for sla in results.slas if sla.metric == metric)


def test_no_recovery_time_says_why(tmp_path: Path) -> None:
    late = Script("hot-spare", spares=1)
    arms.plan(late, rank=2)
    late.train(logs.STEPS)
    arms.inject(late, process="w2", rank=2)
    late.exit("w2", signal=9, expected=False)
    arms.fail(late)
    results = judge(simple(tmp_path / "late", late.finish(healed=["kill"])))
    (incident,), clause = results.faults, _first(results, "recovery_time")
    assert (incident.outcome, incident.recovery_time) == ("recovered", None)
    assert clause.verdict == "inconclusive" and clause.detail == (
        "no value: no step was left to commit after the fault: inject earlier, or raise"
        " workload.steps"
    )
    results = judge(simple(tmp_path / "masked", arms.straggler(), faults=[SLOW]))
    (incident,), clause = results.faults, _first(results, "recovery_time")
    assert (incident.outcome, incident.recovery_time) == ("masked", None)
    assert clause.detail == "no value: every fault was masked, nothing had to recover"


def test_clean_run_passes(tmp_path: Path) -> None:
    results = judge(simple(tmp_path))
    assert (results.verdict, results.exit_code) == ("pass", 0)
    assert (
        results.reason
        == f"4 of 4 SLAs, {len(CHECKERS)} of {len(CHECKERS)} invariants, 1 of 1 faults landed and"
        " healed"
    )
    assert results.cells[0].exactness == "bit for bit"
    assert results.reproduce == "chaos run scenarios/synthetic.yaml --seed 17"
    assert [arm.arm for arm in results.arms] == ["faulted", "control"]
    for arm in results.arms:
        assert arm.useful_s + sum(arm.badput.values()) + arm.residual_s == pytest.approx(arm.wall_s)


@pytest.mark.parametrize("ahead_ns", [HOURS_NS, -HOURS_NS], ids=["ahead", "behind"])
def test_a_node_whose_clock_is_hours_off_gives_the_same_results(
    tmp_path: Path, ahead_ns: int
) -> None:
    written = []
    for name, clock in (("same", Clock(ahead_ns=0)), ("off", Clock(ahead_ns=ahead_ns))):
        run = simple(tmp_path / name, on_nodes(arms.hot_spare(), clock))
        write_results(run, judge(run))
        written.append(run.results.read_text())
    assert written[0] == written[1]
    assert json.loads(written[0])["verdict"] == "pass"


def test_what_the_platform_imitates_is_said(tmp_path: Path) -> None:
    run = simple(tmp_path)
    path = run.events(arm_id("default", 0, "faulted")) / "orchestrator.jsonl"
    head, *rest = path.read_text().splitlines(keepends=True)
    event = json.loads(head)
    event["data"]["emulates"] = "delay by a queue of our own"
    path.write_text("".join([json.dumps(event) + "\n", *rest]))
    assert "delay by a queue of our own" in judge(run).fidelity


def test_results_survive_the_file_and_are_the_same_each_time(tmp_path: Path) -> None:
    script = arms.interrupted("hot-spare", spares=1).finish("gave-up", healed=["kill"])
    run = simple(tmp_path, script)
    write_results(run, judge(run))
    first = run.results.read_text()
    assert Results.model_validate(json.loads(first)) == judge(run)
    write_results(run, judge(run))
    assert run.results.read_text() == first
    assert "Infinity" in first and not list(run.root.glob("*.tmp"))


def test_violated_sla_is_named_with_line_and_number(tmp_path: Path) -> None:
    results = judge(simple(tmp_path, sla={"recovery_time": ["max < 1ms"]}))
    assert (results.verdict, results.exit_code) == ("fail", 1)
    assert results.reason == "synthetic.yaml:14  recovery_time  max < 1ms   observed 0.0771 s, n=1"


def test_a_run_without_faults_does_not_pass(tmp_path: Path) -> None:
    # no two arms take the same time
    script = Script("hot-spare", spares=1, step_ms=logs.STEP_MS + 0.001)
    script.train(script.steps)
    script.finish()
    results = judge(simple(tmp_path, script, faults=[], sla={}))
    assert (results.verdict, results.exit_code) == ("inconclusive", 3)
    assert results.reason == "nothing was tried: the scenario has no faults"


def test_a_run_that_checks_nothing_says_so(tmp_path: Path) -> None:
    results = judge(simple(tmp_path, invariants=[], sla={}))
    assert results.exit_code == 3
    assert results.reason == "nothing was checked: no invariant, and no SLA that may fail"


def test_missing_arms_are_counted(tmp_path: Path) -> None:
    cell = cell_of("hot-spare", [KILL], sla=SLA, repeat=2)
    stored = {arm_id("default", 0, "faulted"): arms.hot_spare()}
    results = judge(make_run(tmp_path, [cell], stored))
    assert results.exit_code == 3
    assert "1 of 4 arms ran" in results.reason


def test_run_that_left_nothing(tmp_path: Path) -> None:
    results = judge(make_run(tmp_path, [cell_of("hot-spare", [KILL], sla=SLA)], {}))
    assert results.exit_code == 3
    assert "0 of 2 arms ran" in results.reason


@pytest.mark.parametrize(("outcome", "code"), [("interrupted", 130), ("broken", 4), ("halted", 6)])
def test_how_the_harness_ended_decides(tmp_path: Path, outcome: str, code: int) -> None:
    script = arms.hot_spare()
    script.edit(Kind.RUN_FINISHED, {"outcome": outcome})
    assert judge(simple(tmp_path, script)).exit_code == code


def test_leftovers_are_unsafe(tmp_path: Path) -> None:
    script = arms.hot_spare()
    script.edit(Kind.LEFTOVERS, {"processes": [{"pid": 7, "process": "w1"}]})
    results = judge(simple(tmp_path, script))
    assert (results.verdict, results.exit_code) == ("unsafe", 5)


def test_nothing_ran_for_want_of_a_capability(tmp_path: Path) -> None:
    results = judge(
        make_run(tmp_path, [], {}, [SkippedCell(cell="default", reason="needs 4 CUDA devices")])
    )
    assert (results.verdict, results.exit_code) == ("skipped", 7)
    assert "needs 4 CUDA devices" in results.reason


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(arms.restart, marks=pytest.mark.long),
        arms.drop_replica,
        pytest.param(arms.corrupt_checkpoint, marks=pytest.mark.long),
        arms.nan,
    ],
)
def test_a_log_cut_anywhere_is_never_a_pass_nor_an_exception(tmp_path: Path, make: Any) -> None:
    whole = make()
    times = sorted({line.time_ns for line in whole.lines})
    for index, cut in enumerate(times[:: max(1, len(times) // 12)]):
        script = make()
        script.lines = [line for line in script.lines if line.time_ns <= cut]
        faults = next(faults for maker, faults in arms.CLEAN.values() if maker is make)
        results = judge(
            simple(tmp_path / str(index), script, recovery=script.strategy, faults=faults)
        )
        assert results.exit_code == (0 if cut == times[-1] else 3), results.reason


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("outcome", ["gave-up", "timed-out"])
def test_a_job_that_did_not_finish_never_passes_whatever_is_asked(
    tmp_path: Path, outcome: str
) -> None:
    script = arms.interrupted("hot-spare", spares=1).finish(outcome, healed=["kill"])
    asked = {"invariants": ["fault-landed"], "sla": {"goodput": ["min > 0.1"]}}
    results = judge(simple(tmp_path / "sla", script, **asked))
    assert (results.verdict, results.arms[0].goodput) == ("fail", 0.0)
    results = judge(simple(tmp_path / "none", script, invariants=["fault-landed"], sla={}))
    assert results.verdict == "fail" and "the job did not finish" in results.reason
    meant = {**KILL, "expect": {"outcome": "fail-stop" if outcome == "gave-up" else "hang"}}
    results = judge(
        simple(tmp_path / "meant", script, invariants=["fault-landed"], sla={}, faults=[meant])
    )
    assert results.verdict == "pass", results.reason


def test_a_metric_says_how_many_values_there_could_have_been(tmp_path: Path) -> None:
    """Three repeats, of which one left no log: nothing may read as if there had been two."""
    cell = cell_of("hot-spare", [KILL], sla=SLA, repeat=3)
    logs_of = {
        arm_id("default", n, kind): (
            arms.hot_spare() if kind == "faulted" else arms.control("hot-spare", spares=1)
        )
        for n in (0, 2)
        for kind in ("faulted", "control")
    }
    results = judge(make_run(tmp_path, [cell], logs_of))
    metrics = results.cells[0].metrics
    for name in ("recovery_time", "steps_lost", "goodput", "step_time"):
        found = metrics[name]
        assert (found.n, found.of, found.of_arms, found.counted) == (2, 3, 3, "2 of 3"), name
    assert metrics["checkpoint_stall"].of is None, "checkpoints are not counted"
    assert {sla.counted for sla in results.slas} == {"2 of 3"}
    assert all("n=2 of 3" in sla.detail for sla in results.slas)
    assert judge(simple(tmp_path / "whole")).cells[0].metrics["recovery_time"].counted == "1"


def test_an_incident_without_a_value_is_counted_and_a_rollback_counts_once() -> None:
    seen = tuple(Incident.model_construct(outcome="masked") for _ in range(3))
    assert chances("recovery_time", [seen, seen[:1]], 2, True).values == 4
    shared = (seen[0], seen[1].model_copy(update={"answered_with": "kill"}))
    assert chances("steps_lost", [shared], 1, True).values == 1
    assert chances("recovery_time", [shared], 3, True).values == 6, "what did not run had as many"
    assert (
        chances("recovery_time", [], 2, True).values == 2
        and chances("recovery_time", [], 2, False).values == 0
    )
    assert chances("checkpoint_stall", [seen], 1, True).values is None
