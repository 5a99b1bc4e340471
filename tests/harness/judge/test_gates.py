"""From values and findings to verdict, exit code and the one line of reason."""

from __future__ import annotations

import math

import pytest

from tests.support.arms import KILL, cell_of
from trainchaos.chaos.scenario.model import SlaCheck
from trainchaos.chaos.scenario.sla import ClauseError
from trainchaos.harness.judge.measure.pressure import TOO_BUSY
from trainchaos.harness.judge.measure.samples import summarise
from trainchaos.harness.judge.results import CellResult, Finding, SlaResult, Verdict, merge
from trainchaos.harness.judge.verdict.gates import (
    EXIT_CODES,
    judge_cell,
    judge_run,
    judge_sla,
    judge_slas,
    quantity,
    sla_line,
)

OK = Finding(verdict="pass", witness="fine")


def sla(
    check: str, values: list[float], metric: str = "recovery_time", severity: str = "fail"
) -> SlaResult:
    return judge_sla(
        "default",
        metric,
        SlaCheck.model_validate({"check": check, "severity": severity}),
        summarise(metric, values),
        14,
        "",
    )


def cell(verdict: Verdict, reason: str = "because", name: str = "default") -> CellResult:
    return CellResult(
        id=name,
        params={},
        strategy="hot-spare",
        verdict=verdict,
        reason=reason,
        metrics={},
        invariants={"a": OK},
        exactness="bit for bit",
    )


@pytest.mark.parametrize(
    ("check", "values", "verdict", "observed"),
    [
        ("median < 2s", [1.0, 1.5, 9.0], "pass", 1.5),
        ("max < 5s", [1.0, 1.5, 9.0], "fail", 9.0),
        ("max < 1ms", [0.1], "fail", 0.1),
        ("median < 2s", [1.0, 1.5, math.inf], "pass", 1.5),
        ("max < 2s", [1.0, 1.5, math.inf], "fail", math.inf),
        ("max > 2s", [math.inf], "fail", math.inf),
        ("p95 < 2s", [1.0] * 5, "inconclusive", 1.0),
        ("p90 < 2s", [1.0] * 29, "pass", 1.0),
        ("median < 2s", [], "inconclusive", None),
    ],
)
def test_clause(check: str, values: list[float], verdict: str, observed: float | None) -> None:
    result = sla(check, values)
    assert (result.verdict, result.observed) == (verdict, observed)


def test_reason_names_the_clause_its_place_and_the_number() -> None:
    result = sla("median < 0.5s", [0.71, 0.8, 0.82, 0.84, 0.9, 1.02])
    assert (
        sla_line(result, "scenarios/kill-one-rank.yaml")
        == "kill-one-rank.yaml:14  recovery_time  median < 0.5s   observed 0.830 s [0.710,"
        " 1.02], n=6"
    )


def test_unrecovered_runs_are_counted_aloud() -> None:
    assert "1 of 2 never recovered" in sla("max < 2s", [1.0, math.inf]).detail


def test_no_value_says_what_was_missing() -> None:
    missing = "kill was due at step 400, the run ended at 40: lower at.step or raise workload.steps"
    given = cell_of("hot-spare", [KILL], sla={"recovery_time": ["max < 2s"]})
    none = {"recovery_time": summarise("recovery_time", [])}
    (result,) = judge_slas(given, none, {"recovery_time": [9]}, missing)
    assert (result.verdict, result.line) == ("inconclusive", 9)
    assert "due at step 400" in result.detail


def test_a_clause_for_a_kind_of_fault_holds_in_its_cells_only() -> None:
    bounds = [{"check": "max < 2s", "fault": kind} for kind in (KILL["kind"], "process-stop")]
    given = cell_of("hot-spare", [KILL], sla={"recovery_time": [*bounds, "max < 9s"]})
    metrics = {"recovery_time": summarise("recovery_time", [1.0])}
    found = judge_slas(given, metrics, {"recovery_time": [7, 8, 9]}, "")
    assert [(one.line, one.verdict) for one in found] == [(7, "pass"), (9, "pass")]


def test_unreadable_clause_and_unknown_metric_are_errors() -> None:
    with pytest.raises(ClauseError):
        sla("median < 2 parsecs", [1.0])
    with pytest.raises(KeyError):
        sla("median < 2s", [1.0], metric="recovery_tim")


def test_warnings_never_fail() -> None:
    warned = sla("max < 1ms", [1.0], severity="warn")
    assert warned.verdict == "fail"
    assert judge_cell("default", [warned], {"a": OK}, 2, 2, "x.yaml")[0] == "pass"


def test_three_valued_merge() -> None:
    assert merge(["pass", "inconclusive", "fail"]) == "fail"
    assert merge(["pass", "inconclusive"]) == "inconclusive"
    assert merge([]) == "inconclusive"


def test_cell_reasons() -> None:
    bad = Finding(verdict="fail", witness="step 30 lost 4")
    open_ = Finding(verdict="inconclusive", witness="nobody saw it land")
    assert judge_cell("c", [], {"a": OK, "b": bad}, 2, 2, "x.yaml") == ("fail", "b: step 30 lost 4")
    assert (
        judge_cell("c", [], {"a": open_, "fault-landed": open_}, 2, 2, "x")[1]
        == "fault-landed: nobody saw it land"
    )
    assert judge_cell("c", [], {"a": OK}, 1, 2, "x") == (
        "inconclusive",
        "1 of 2 arms ran: c cannot be judged; run it again",
    )
    assert judge_cell("c", [], {}, 0, 2, "x")[0] == "inconclusive"


def test_exit_codes() -> None:
    assert EXIT_CODES == {
        "pass": 0,
        "fail": 1,
        "inconclusive": 3,
        "broken": 4,
        "unsafe": 5,
        "halted": 6,
        "skipped": 7,
        "interrupted": 130,
    }


@pytest.mark.parametrize(
    ("verdicts", "outcomes", "unsafe", "code"),
    [
        (["pass", "pass"], ["completed"], [], 0),
        (["pass", "fail", "inconclusive"], ["completed"], [], 1),
        (["pass", "inconclusive"], ["completed"], [], 3),
        (["fail"], ["broken"], [], 4),
        (["fail"], ["interrupted", "broken"], ["pid 7"], 5),
        (["fail"], ["halted"], [], 6),
        ([], [], [], 7),
        (["inconclusive"], ["interrupted", "broken"], [], 130),
    ],
)
def test_exit_code_of_a_run(
    verdicts: list[Verdict], outcomes: list[str], unsafe: list[str], code: int
) -> None:
    cells = [cell(verdict, name=f"c{n}") for n, verdict in enumerate(verdicts)]
    ended = {f"arm{n}": (outcome, "why") for n, outcome in enumerate(outcomes)}
    assert judge_run(cells, [], ended, unsafe, (1, 1), []).exit_code == code


def test_pass_is_counted_and_skips_are_named() -> None:
    gate = judge_run(
        [cell("pass")], [sla("max < 2s", [1.0])], {}, [], (3, 3), ["gpu: needs 4 CUDA devices"]
    )
    assert (
        gate.reason
        == "1 of 1 SLAs, 1 of 1 invariants, 3 of 3 faults landed and healed; skipped: gpu: needs 4"
        " CUDA devices"
    )


def test_failing_cell_is_named() -> None:
    gate = judge_run(
        [cell("pass", name="a"), cell("fail", "too slow", "b")], [], {}, [], (1, 1), []
    )
    assert gate.reason == "b: too slow"


def test_a_machine_that_was_too_busy_comes_first_whichever_cell_it_left_open() -> None:
    busy = cell("inconclusive", f"{TOO_BUSY}liveness: its ranks stood in a run queue", "b")
    gate = judge_run([cell("pass", name="a"), busy], [], {}, [], (1, 1), [])
    assert gate.reason == f"{TOO_BUSY}b: liveness: its ranks stood in a run queue"
    assert judge_run([busy], [], {}, [], (1, 1), []).reason == busy.reason
    torn = cell("inconclusive", "log-complete: it is torn", "c")
    assert judge_run([busy, torn], [], {}, [], (1, 1), []).reason == "c: log-complete: it is torn"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.8312, "s", "0.831 s"),
        (2.0, "steps", "2 steps"),
        (0.951, "ratio", "0.951"),
        (math.inf, "s", "infinite"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text
