"""Times bounded in steps of the control arm: judged, said in both units, and beyond any machine's
speed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.harness.judge.test_judge import make_run, simple
from tests.support import arms, logs
from tests.support.arms import KILL, cell_of
from trainchaos.chaos import cli
from trainchaos.chaos.scenario.model import SlaCheck
from trainchaos.harness.gating.gate import gate
from trainchaos.harness.host.rundir import arm_id
from trainchaos.harness.judge.measure.samples import summarise
from trainchaos.harness.judge.results import Results, SlaResult
from trainchaos.harness.judge.verdict.gates import judge_sla
from trainchaos.harness.judge.verdict.judge import judge, write_results
from trainchaos.reports import html, junit, markdown
from trainchaos.reports.outlets import github
from trainchaos.reports.outlets.terminal import summary

MAIN = Path(__file__).resolve().parents[3] / "scenarios" / "kill-one-rank.yaml"
STEP_MS, FORM_MS, LONGER = 40.0, 10.0, 60
INF = math.inf


def sla(check: str, values: list[float], steps: dict[int, float], bound: float = 0.0) -> SlaResult:
    metric = summarise("recovery_time", values, bound)
    return judge_sla("default", "recovery_time", SlaCheck(check=check), metric, 14, "", steps=steps)


@pytest.mark.parametrize(
    ("check", "values", "steps", "verdict", "observed", "observed_s"),
    [
        ("max < 5 steps", [2.0, 1.0], {0: 0.5, 1: 0.5}, "pass", 4.0, 2.0),
        ("max < 4 steps", [2.0, 1.0], {0: 0.5, 1: 0.5}, "fail", 4.0, 2.0),
        ("max <= 1 step", [0.5], {0: 0.5}, "pass", 1.0, 0.5),
        # a machine that was slower in one repeat: each counts by its own step
        ("max < 5 steps", [1.0, 9.0], {0: 0.25, 1: 2.25}, "pass", 4.0, 9.0),
        ("median < 5 steps", [1.0, 9.0, 2.0], {0: 1.0, 1: 1.0, 2: 1.0}, "pass", 2.0, 2.0),
        ("median < 2s", [3.0], {0: 9.0}, "fail", 3.0, None),
        ("max < 5 steps", [INF, 1.0], {0: 0.5, 1: 0.5}, "fail", INF, INF),
        # never recovered: that is so without a step to count by
        ("max < 5 steps", [INF, 1.0], {}, "fail", INF, INF),
        ("min < 5 steps", [INF, 1.0], {0: 0.5}, "inconclusive", None, None),
        ("max < 5 steps", [1.0, 1.0], {0: 0.5}, "inconclusive", None, None),
    ],
)
def test_each_value_counts_by_the_step_of_its_own_repeat(
    check: str,
    values: list[float],
    steps: dict[int, float],
    verdict: str,
    observed: float | None,
    observed_s: float | None,
) -> None:
    result = sla(check, values, steps)
    assert (result.verdict, result.observed, result.observed_s) == (verdict, observed, observed_s)
    assert result.unit == ("s" if check.endswith("s") and "step" not in check else "steps")
    assert SlaResult.model_validate_json(result.model_dump_json()) == result


def test_both_units_are_said_with_the_step() -> None:
    one = sla("median < 40 steps", [0.25, 0.75, 0.5], {0: 0.125, 1: 0.125, 2: 0.125})
    assert one.detail == "observed 4 steps (0.500 s, a step of 0.125 s), n=3"
    assert one.detail.startswith(f"observed {one.shown('lower')}")
    two = sla("max < 3 steps", [0.25, 0.5], {0: 0.125, 1: 0.25})
    assert two.shown("lower") == "2 steps (0.500 s, steps of 0.125 to 0.250 s)"
    assert sla("max < 3 steps", [INF], {0: 0.125}).shown() == "never (a step of 0.125 s)"
    assert (sla("max < 3s", [0.5], {0: 0.125}).shown(), one.timed) == ("0.500 s", True)


def test_a_missing_step_is_said_with_its_repeat() -> None:
    assert sla("max < 5 steps", [1.0, 1.0, INF], {0: 0.5}).detail.startswith("observed infinite")
    assert sla("min < 5 steps", [1.0, 1.0, INF], {0: 0.5}).detail == (
        "no value: its unit is a step of the control arm, and that of repeat 1 shows none: run it"
        " again, or bound seconds"
    )


def test_clocks_blur_steps_as_they_blur_seconds() -> None:
    """10 ms are two fifths of a step of 25 ms."""
    verdicts = [
        sla(f"max < {limit} steps", [1.0], {0: 0.025}, bound=0.010).verdict
        for limit in (39.5, 40.3, 40.5)
    ]
    assert verdicts == ["fail", "inconclusive", "pass"]
    found = sla("max < 40.3 steps", [1.0], {0: 0.025}, bound=0.010)
    assert "blur it by 0.400 steps" in found.detail and found.error(0.010) == pytest.approx(0.4)
    assert sla("max < 5s", [1.0], {}).error(0.010) == 0.010


# ---- whole runs


@pytest.mark.parametrize(
    ("clause", "verdict"), [("max < 2 steps", "pass"), ("max < 1 step", "fail")]
)
def test_a_run_is_judged_by_its_control_arm_and_alike_again(
    clause: str, verdict: str, tmp_path: Path
) -> None:
    run = simple(tmp_path, sla={"recovery_time": [clause]})
    (found,) = judge(run).slas
    assert (found.verdict, found.unit) == (verdict, "steps")
    assert found.step_s == pytest.approx([logs.STEP_MS / 1000], rel=0.05)
    assert found.observed_s == judge(run).faults[0].recovery_time
    assert found.observed == pytest.approx(found.observed_s / (found.step_s[0] or 0.0))
    write_results(run, judge(run))
    assert Results.model_validate(json.loads(run.results.read_text())) == judge(run)


def test_without_the_control_arm_nothing_is_known(tmp_path: Path) -> None:
    cell = cell_of("hot-spare", [KILL], sla={"recovery_time": ["max < 99 steps"]})
    faulted = {arm_id("default", 0, "faulted"): arms.hot_spare()}
    (found,) = judge(make_run(tmp_path, [cell], faulted)).slas
    assert (found.verdict, found.values) == ("inconclusive", [])
    assert "that of repeat 0 shows none" in found.detail


def test_every_output_has_both_units(tmp_path: Path) -> None:
    run = simple(tmp_path, sla={"recovery_time": ["max < 1 step"]})
    results = judge(run)
    (found,) = results.slas
    said = found.shown("lower")
    assert " steps (0.0771 s, a step of 0.0" in said
    assert f"observed {said}, n=1" in results.reason
    assert f"observed {said}, n=1" in "\n".join(summary(results, run).splitlines())
    case = f'message="recovery_time max &lt; 1 step: observed {said}, n=1"'
    assert case in junit.render(run, results).read_text()
    assert f"{found.shown()}" in markdown.render(run, results).read_text()
    assert f"observed {said}, n = 1" in html.render(run, results).read_text()
    assert f"observed {said}, n=1" in github.remarks(results, {})[0].message
    (clause,) = gate(results).clauses
    assert clause.verdict == "fail" and clause.detail.endswith(f"; observed {said}")
    where = [line for line in summary(results, run).splitlines() if "where it went" in line]
    assert len(where) == 1


# ---- the main scenario


@pytest.mark.parametrize(
    ("longer", "step_ms"),
    [
        (0, 5 * STEP_MS),
        (LONGER, STEP_MS),
        pytest.param(0, STEP_MS, marks=pytest.mark.long),
        pytest.param(LONGER, 5 * STEP_MS, marks=pytest.mark.long),
    ],
)
def test_the_main_scenario_fails_a_recovery_of_60_more_steps_and_no_slow_machine(
    longer: int, step_ms: float, tmp_path: Path
) -> None:
    """On a machine five times slower as well. Only the time to form a group is longer: as in a
    regroup that waits for something.
    """
    slower = step_ms / STEP_MS
    form_ms = slower * FORM_MS + longer * step_ms
    params = f"{{step_ms: {step_ms}, form_ms: {form_ms}}}"
    argv = ["run", str(MAIN), "--runs", str(tmp_path), "-q", "--repeat", "1"]
    argv += ["--set", f"launcher={{kind: sim, params: {params}}}"]
    cli.invoke(argv)
    stored = tmp_path / "kill-one-rank" / "latest" / "results.json"
    results = Results.model_validate_json(stored.read_text())
    median = [s for s in results.slas if s.metric == "recovery_time" and "median" in s.clause]
    assert len(median) == 3
    assert {one.verdict for one in median} == {"fail" if longer else "pass"}
    assert longer or results.verdict == "pass"
