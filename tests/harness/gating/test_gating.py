"""What turns a gate red: bounds that cross limits, counterexamples, and nothing that chance does on
its own.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.stats import LEVEL, median_ci95, next_beyond, values_to_predict
from trainchaos.harness.gating import gate as gate_module
from trainchaos.harness.gating.baseline import Baseline, BaselineCell
from trainchaos.harness.gating.clauses import ClauseDecision, decide
from trainchaos.harness.gating.gate import (
    BaselineComparison,
    GateResult,
    as_text,
    gate,
    gated,
    write,
)
from trainchaos.harness.gating.looks import InterimLook, Looks
from trainchaos.harness.gating.regression import ToleranceError, compare, parse_share, tolerance_of
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.figures import Metric
from trainchaos.harness.judge.measure.measure import METRICS, summarise
from trainchaos.harness.judge.measure.samples import PossibleValues, per_arm
from trainchaos.harness.judge.results import ArmResult, CellResult, Finding, Results, SlaResult

Values = Mapping[str, Sequence[float]]


def sla(
    clause: str, values: Sequence[float], metric: str = "recovery_time", **more: Any
) -> SlaResult:
    told = {"cell": "default", "severity": "fail", "verdict": "pass", "observed": None, "line": 14}
    told |= {"unit": METRICS[metric].unit, "detail": "no value: nobody looked"} | more
    return SlaResult(metric=metric, clause=clause, values=list(values), **told)


def decided(
    clause: str, values: Sequence[float], level: float = 0.05, *, clock: float = 0.0, **more: Any
) -> ClauseDecision:
    return decide(sla(clause, values, **more), level, clock_bound=clock)


def arm(cell: str, repeat: int) -> ArmResult:
    words = dict.fromkeys(("events", "outcome", "reason"), "")
    ones = dict.fromkeys(
        ("wall_s", "committed_step", "steps", "goodput", "useful_s", "step_time_median"), 1
    )
    own = {"id": f"{cell}.r{repeat}.faulted", "cell": cell, "repeat": repeat, "seed": repeat}
    rest = {"arm": "faulted", "badput": {}, "residual_s": 0, "provisioned_ranks": 1}
    return ArmResult.model_validate({**words, **ones, **own, **rest, "invariants": {}})


def measured(values: Values) -> dict[str, Metric]:
    return {name: summarise(name, list(each)) for name, each in values.items()}


def run_of(
    cells: Mapping[str, Values],
    slas: Sequence[SlaResult] = (),
    *,
    repeats: int = 5,
    verdict: str = "pass",
    invariants: Mapping[str, Finding] | None = None,
    **more: Any,
) -> Results:
    """A judged run of so many repeats with these values."""
    fine = {"liveness": Finding(verdict="pass", witness="fine")}
    told: dict[str, Any] = {
        "strategy": "hot-spare",
        "reason": "because",
        "exactness": "bit for bit",
        "params": {},
    }
    told |= {"verdict": "pass", "invariants": fine if invariants is None else invariants} | more
    made = [CellResult(id=name, metrics=measured(each), **told) for name, each in cells.items()]
    return Results(
        scenario="example",
        description="",
        run_id="now",
        seed=1,
        started="2026-11-20T18:02:11+00:00",
        source="dir/example.yaml",
        system={},
        workload={},
        verdict=verdict,
        exit_code=0,
        reason="because",
        cells=made,
        arms=[arm(name, n) for name in cells for n in range(repeats)],
        faults=[],
        slas=list(slas),
        skipped=[],
        fidelity=[],
        reproduce="chaos run dir/example.yaml",
    )


def baseline_of(cells: Mapping[str, Values]) -> Baseline:
    made = {
        name: BaselineCell(strategy="hot-spare", test={}, metrics=measured(values))
        for name, values in cells.items()
    }
    same = {"scenario": "example", "run_id": "then", "started": "", "seed": 1, "verdict": "pass"}
    return Baseline.model_validate({**same, "machine": {}, "versions": {}, "cells": made})


def against(now: Values, then: Values, repeats: int = 5, **choices: Any) -> GateResult:
    """The gate of one cell against a baseline."""
    chosen = BaselineComparison(baseline=baseline_of({"default": then}), **choices)
    return gate(run_of({"default": now}, repeats=repeats), chosen)


# --- one clause


@pytest.mark.parametrize(
    ("clause", "values", "verdict"),
    [
        ("median < 2s", [1.0] * 5, "pass"),
        ("median < 2s", [1.0] * 4, "inconclusive"),  # no bound of a median with so few
        ("median < 2s", [3.0] * 5, "fail"),
        ("median < 2s", [3.0] * 4, "inconclusive"),
        ("median < 2s", [1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0], "inconclusive"),
        ("median < 2s", [2.0] * 5, "fail"),  # on the limit: not below it
        ("median <= 2s", [2.0] * 5, "pass"),
        ("median < 2s", [1.0] * 7 + [math.inf], "pass"),
        ("median < 2s", [1.0] + [math.inf] * 7, "fail"),
        ("median > 2s", [math.inf] * 8, "fail"),  # non-recovery never meets a bound
        ("p90 < 2s", [1.0] * 2 + [3.0] * 8, "fail"),
        ("min > 2s", [3.0] * 18, "inconclusive"),
        ("all > 2s", [3.0] * 19, "pass"),
        ("all == 0s", [0.0] * 18, "inconclusive"),
        ("all == 0s", [0.0] * 19, "pass"),
        ("max < 2s", [1.0, 1.0, 3.0], "fail"),
        ("all < 2s", [1.0, math.inf], "fail"),
        ("min > 2s", [3.0, 1.0], "fail"),
        ("max > 2s", [3.0, 1.0], "pass"),
        ("max > 2s", [1.0] * 50, "inconclusive"),
        ("mean < 2s", [1.0] * 50, "inconclusive"),
        ("mean < 2s", [1.0] * 50 + [math.inf], "fail"),
        ("median == 0s", [0.0] * 8, "pass"),
        ("median == 0s", [1.0] * 8, "fail"),
        ("all == 0s", [0.0, 0.0, 1.0], "fail"),
        ("median < 2s", [], "inconclusive"),
    ],
)
def test_clause(clause: str, values: list[float], verdict: str) -> None:
    assert decided(clause, values).verdict == verdict


def test_goodput_is_better_when_it_is_higher() -> None:
    for clause, values, verdict in [
        ("median >= 0.5", [0.9] * 6, "pass"),
        ("median >= 50%", [0.4] * 6, "fail"),
        ("p90 >= 0.5", [0.4] * 40, "fail"),
    ]:
        assert decided(clause, values, metric="goodput").verdict == verdict


def test_bounds_are_said_and_rounded_so_that_they_stay_bounds() -> None:
    text = decided("median < 2s", [1.00049, 1.0, 1.0, 1.0, 1.00051], 0.01).detail
    assert text == "median at most 1.01 s with 95 %, n=5"
    text = decided("median < 2s", [2.9999] * 7, 0.01).detail
    assert text.startswith("median at least 2.99 s with 99 % confidence")


def test_clocks_may_turn_neither_way() -> None:
    near = [1.98] * 9
    assert decided("median < 2s", near).verdict == "pass"
    blurred = decided("median < 2s", near, clock=0.05)
    assert blurred.verdict == "inconclusive" and "more repeats do not help" in blurred.detail
    assert blurred.needed is None
    assert decided("max < 2s", [2.01], clock=0.05).verdict == "inconclusive"
    assert decided("max < 2s", [2.1], clock=0.05).verdict == "fail"


@pytest.mark.parametrize(
    ("clause", "fewest"),
    [("max < 5s", 19), ("all < 5s", 19), ("median < 5s", 5), ("p90 < 5s", 29), ("p95 < 5s", 59)],
)
def test_what_one_value_cannot_bound_is_no_bound_and_says_how_many_do(
    clause: str, fewest: int
) -> None:
    found = decided(clause, [1.0])
    assert (
        found.verdict == "inconclusive"
        and f"not a bound: 1 arm of at least {fewest}" in found.detail
    )
    assert found.needed is not None and found.needed >= fewest
    assert decided(clause, [1.0] * (fewest - 1)).verdict == "inconclusive"
    assert decided(clause, [1.0] * fewest).verdict == "pass"


def test_the_worst_of_so_many_bounds_the_next_one() -> None:
    """By counting: of all orders of n + 1 values, the share in which the last one is beyond all
    before.
    """
    for n in range(1, 7):
        orders = list(itertools.permutations(range(n + 1)))
        share = Fraction(sum(order[-1] == n for order in orders), len(orders))
        assert next_beyond(n) == pytest.approx(float(share)) == pytest.approx(1 / (n + 1))
    assert [values_to_predict(level) for level in (0.5, 0.1, 0.05, 0.025)] == [1, 9, 19, 39]
    assert next_beyond(values_to_predict(0.05)) <= 0.05 < next_beyond(values_to_predict(0.05) - 1)


@pytest.mark.parametrize("clause", ["median < 2s", "p90 < 2s", "max < 2s", "all < 2s"])
def test_values_of_one_arm_count_once(clause: str) -> None:
    """Twelve values of three arms bound no more than three do; of thirty arms as much as thirty."""
    one = decided(clause, [1.0] * 12, arms=[0, 1, 2] * 4)
    assert one == decided(clause, [1.0] * 3) and one.verdict == "inconclusive"
    pairs = [n // 2 for n in range(60)]
    assert decided(clause, [1.0] * 60, arms=pairs).verdict == "pass"
    assert decided(clause, [3.0] * 60, arms=pairs).verdict == "fail"


def test_an_arm_speaks_with_its_worst_value_where_the_clause_is_of_each() -> None:
    arms, values = [0, 0, 1, 1], [1.0, 3.0, 1.0, 1.0]
    assert decided("max < 2s", values, arms=arms).verdict == "fail"
    assert per_arm(values, arms) == [2.0, 1.0] and per_arm(values, arms, max) == [3.0, 1.0]
    assert per_arm(values, []) == values  # a record from before arms were kept


def test_the_interval_of_a_median_is_of_arms() -> None:
    values = [float(n) for n in range(12)]
    assert summarise("recovery_time", values).ci95 is not None
    assert summarise("recovery_time", values, arms=[0, 1, 2] * 4).ci95 is None
    six = summarise("recovery_time", values, arms=[n // 2 for n in range(12)])
    assert six.ci95 == median_ci95([0.5, 2.5, 4.5, 6.5, 8.5, 10.5]) == (0.5, 10.5)


def test_a_clause_says_of_how_many_arms_it_knows() -> None:
    """Two of three arms gave a value: n is not 2 without a word."""
    for clause, clock in [("median", 0.0), ("min", 0.0), ("mean", 0.0), ("max", 0.5)]:
        values = [0.4, 0.5, 0.5, 0.6, 0.4]
        found = decided(f"{clause} < 1s", values, clock=clock, of=6, of_arms=6)
        assert "n=5 of 6" in found.detail
    few = PossibleValues(values=7, arms=6)
    now, then = (summarise("recovery_time", [each] * 5, possible=few) for each in (0.4, 0.3))
    assert compare(now, then, tolerance_of("s", None), 0.05).detail.count("(n=5 of 6)") == 2


# --- a whole gate


def test_a_gate_needs_every_clause_shown() -> None:
    cells = {"default": {"recovery_time": [1.0] * 5}}
    fine = sla("median < 2s", [1.0] * 5)
    assert gate(run_of(cells, [fine])).exit_code == 0
    red = gate(run_of(cells, [fine, sla("max < 2s", [3.0])]))
    assert (red.verdict, red.exit_code) == ("fail", 1)
    assert red.reason.startswith("example.yaml:14  recovery_time  max")
    amber = gate(run_of(cells, [sla("median < 2s", [1.0] * 2)], repeats=2))
    repeats = amber.clauses[0].repeats
    assert (amber.verdict, amber.exit_code) == ("inconclusive", 3)
    assert repeats is not None and f"--repeat {repeats}" in amber.reason
    # values of several faults are counted in repeats
    (one,) = gate(run_of(cells, [sla("median < 2s", [1.0] * 4)], repeats=1)).clauses
    assert one.repeats is not None and 2 <= one.repeats <= 4


@pytest.mark.parametrize(
    ("more", "code", "reason"),
    [
        (
            {"invariants": {"liveness": Finding(verdict="fail", witness="r1 stood still")}},
            1,
            "default: liveness: r1 stood still",
        ),
        (
            {"invariants": {"liveness": Finding(verdict="inconclusive", witness="torn log")}},
            3,
            "default: liveness: torn log",
        ),
        ({"invariants": {}}, 3, None),  # nothing checked
        ({"cell": "1 of 2 arms ran"}, 3, "default: 1 of 2 arms ran"),
    ],
)
def test_what_is_not_shown_is_no_pass(more: Any, code: int, reason: str | None) -> None:
    results = run_of({"default": {"recovery_time": [1.0]}}, invariants=more.get("invariants"))
    if "cell" in more:
        update = {"verdict": "inconclusive", "reason": more["cell"]}
        cell = results.cells[0].model_copy(update=update)
        results = results.model_copy(update={"cells": [cell], "verdict": "inconclusive"})
    found = gate(results)
    assert found.exit_code == code and found.reason == (reason or found.reason)


def test_a_warning_never_turns_it_red() -> None:
    cells = {"default": {"recovery_time": [3.0] * 9}}
    found = gate(run_of(cells, [sla("median < 2s", [3.0] * 9, severity="warn")]))
    assert found.verdict == "pass" and found.clauses[0].verdict == "fail"
    assert "warning only" in as_text(found, "example.yaml")


@pytest.mark.parametrize(
    ("verdict", "code"), [("unsafe", 5), ("broken", 4), ("interrupted", 130), ("skipped", 7)]
)
def test_a_run_that_came_to_no_end_keeps_its_verdict(verdict: str, code: int) -> None:
    results = run_of({}, verdict=verdict).model_copy(update={"exit_code": code})
    assert (gate(results).verdict, gate(results).exit_code) == (verdict, code)


def test_reports_see_what_the_gate_decided_and_it_is_kept_with_its_infinities(
    tmp_path: Path,
) -> None:
    results = run_of({"default": {}}, [sla("max < 2s", [3.0, math.inf])])
    found = gate(results)
    shown = gated(results, found)
    assert (shown.verdict, shown.exit_code, shown.slas[0].verdict) == ("fail", 1, "fail")
    path = write(RunDirectory(tmp_path), found)
    assert GateResult.model_validate_json(path.read_text()) == found
    assert json.loads(path.read_text())["clauses"][0]["values"] == [3.0, "Infinity"]


# --- against a baseline


def compared(
    now: Sequence[float], then: Sequence[float], name: str = "recovery_time", **more: Any
) -> ClauseDecision:
    sides = [summarise(name, list(values), **more) for values in (now, then)]
    return compare(*sides, tolerance_of(METRICS[name].unit), 0.05)


@pytest.mark.parametrize(
    ("name", "now", "then", "verdict"),
    [
        ("recovery_time", [1.0] * 5, [1.0] * 5, "pass"),
        ("recovery_time", [1.15] * 5, [1.0] * 5, "pass"),  # tolerated
        ("recovery_time", [1.5] * 5, [1.0] * 5, "fail"),
        ("recovery_time", [1.5] * 2, [1.0] * 2, "inconclusive"),
        ("recovery_time", [0.012] * 9, [0.004] * 9, "pass"),  # three times as long, and 8 ms
        ("recovery_time", [math.inf] * 5, [1.0] * 5, "fail"),
        ("recovery_time", [math.inf] * 5, [math.inf] * 5, "pass"),  # as bad as before
        ("recovery_time", [1.0] * 5, [math.inf] * 5, "pass"),
        ("recovery_time", [1.0] * 4 + [math.inf], [1.0] * 5, "inconclusive"),
        ("recovery_time", [], [1.0] * 5, "inconclusive"),
        ("goodput", [0.90] * 5, [0.92] * 5, "pass"),
        ("goodput", [0.70] * 5, [0.92] * 5, "fail"),
        ("goodput", [0.99] * 5, [0.92] * 5, "pass"),
        ("steps_lost", [0.0] * 5, [0.0] * 5, "pass"),
        ("steps_lost", [1.0] * 5, [0.0] * 5, "fail"),  # no tolerance for a count
    ],
)
def test_comparison(name: str, now: list[float], then: list[float], verdict: str) -> None:
    assert compared(now, then, name).verdict == verdict


def test_a_comparison_is_of_arms_and_of_both_clocks() -> None:
    assert compared([1.5] * 12, [1.0] * 12).verdict == "fail"
    assert compared([1.5] * 12, [1.0] * 12, arms=[0, 1] * 6).verdict == "inconclusive"
    found = compared([1.3] * 6, [1.0] * 6, bound=0.1)
    assert found.verdict == "inconclusive" and "clocks" in found.detail


def test_an_open_comparison_says_how_many_on_both_sides() -> None:
    (clause,) = against({"recovery_time": [1.5, 1.6]}, {"recovery_time": [1.0, 1.1]}, 2).clauses
    assert clause.verdict == "inconclusive" and clause.repeats is not None
    assert f"--repeat {clause.repeats} here and in the baseline" in clause.detail
    assert (clause.against, clause.line) == ("baseline", None)


def test_cells_of_one_side_only_are_said() -> None:
    old = BaselineComparison(baseline=baseline_of({"old": {"recovery_time": [1.0]}}))
    found = gate(run_of({"new": {"recovery_time": [1.0]}}), old)
    assert found.warnings == [
        "new is not in the baseline: save a new one",
        "old of the baseline did not run",
    ]
    assert "warning: old" in as_text(found, "")


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0.25", 0.25), (" 5 % ", 0.05), ("0", 0.0)]
)
def test_tolerances_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "a lot", "-1%", "200%", "1", "inf", "nan"])
def test_no_tolerance(text: str) -> None:
    with pytest.raises(ToleranceError, match=r"write .*10%"):
        parse_share(text)


# --- how often it is wrong


def noisy(rng: random.Random, n: int, slow: float = 1.0) -> dict[str, list[float]]:
    """Values as runs give them: a heavy right tail, and one bad arm bad in all of its metrics."""
    luck = [rng.lognormvariate(0, 0.3) * (3 if rng.random() < 0.05 else 1) for _ in range(n)]
    return {
        "recovery_time": [slow * 0.5 * x * rng.lognormvariate(0, 0.2) for x in luck],
        "detection_time": [slow * 0.05 * x * rng.lognormvariate(0, 0.5) for x in luck],
        "step_time": [slow * 0.04 * x * rng.lognormvariate(0, 0.05) for x in luck],
        "goodput": [min(1.0, 0.8 / (slow * x)) for x in luck],
        "steps_lost": [float(rng.randint(0, 3)) for _ in luck],
        "samples_lost": [0.0] * n,
    }


def allowed(runs: int) -> float:
    """Most of so many runs that a level of 5 % lets be wrong, but for chance of one in a
    thousand.
    """
    return runs * LEVEL + 3.1 * math.sqrt(runs * LEVEL * (1 - LEVEL))


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [5, 8, 20])
def test_the_same_against_itself_is_red_in_one_gate_of_twenty_at_most(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what such a gate can see is no part of its verdict, and takes longer than that
    monkeypatch.setattr(gate_module, "least_seen", lambda *asked: None)
    rng = random.Random(n)
    # the hardest case: no tolerance at all
    nothing = {name: tolerance_of("steps") for name in METRICS}
    red = 0
    for _ in range(200):
        now, then = ({cell: noisy(rng, n) for cell in ("a", "b", "c")} for _ in range(2))
        found = gate(
            run_of(now, repeats=n),
            BaselineComparison(baseline=baseline_of(then), tolerances=nothing),
        )
        red += found.verdict == "fail"
    assert red <= allowed(200)


def test_limits_that_are_the_true_medians_are_red_in_one_gate_of_twenty_at_most() -> None:
    rng, red = random.Random(7), 0
    for _ in range(200):
        slas = [
            sla("median <= 1s", [rng.lognormvariate(0, 0.5) for _ in range(9)]) for _ in range(12)
        ]
        red += gate(run_of({"default": {}}, slas)).verdict == "fail"
    assert red <= allowed(200)


def extended(rng: random.Random, planned: int) -> str:
    """The answer of looks at 6, 12 and 18 arms, until one answers, with a limit that is the true
    median.
    """
    values: list[float] = []
    looks = Looks(planned=planned)
    for n in (6, 12, 18):
        values += [rng.lognormvariate(0, 0.5) for _ in range(6)]
        seen = [*looks.looks, InterimLook(arms={"default": list(range(n))})]
        looks = looks.model_copy(update={"looks": seen if planned > 1 else seen[-1:]})
        found = gate(run_of({"default": {}}, [sla("median <= 1s", values)], repeats=n), None, looks)
        if found.verdict != "inconclusive":
            return found.verdict
    return "inconclusive"


@pytest.mark.long
def test_looks_that_were_planned_are_wrong_no_more_often_in_all_than_one() -> None:
    """Neither red nor green is right there: the limit is met in half of all values."""
    rng, runs = random.Random(11), 400
    for wrong in ("pass", "fail"):
        assert sum(extended(rng, 3) == wrong for _ in range(runs)) <= allowed(runs)
    unplanned = sum(extended(rng, 1) == "fail" for _ in range(runs))
    assert unplanned > runs * LEVEL, "three looks with the whole level each are wrong more often"


def test_twice_as_slow_is_red() -> None:
    rng = random.Random(9)
    found = [against(noisy(rng, 15, slow=2.0), noisy(rng, 15), 15) for _ in range(50)]
    assert sum(one.verdict == "fail" for one in found) >= 45


def test_a_gate_says_its_level() -> None:
    slas = [sla("median < 2s", [1.0] * 9), sla("median < 3s", [1.0] * 9), sla("max < 2s", [1.0])]
    found: GateResult = gate(run_of({"default": {}}, slas))
    assert (found.level, found.share) == (
        LEVEL,
        LEVEL / 2,
    )  # one counterexample breaks the third: no chance in it
    assert found.family == 2 and found.notes[-1:] == [
        "red by chance in at most 5 % of such gates: 2.5 % for each of 2 clauses that chance can"
        " break, in 1 cell"
    ]
    assert found.notes[-1] in as_text(found, "")


def test_an_open_gate_says_what_settles_all_of_it() -> None:
    slas = [sla("median < 2s", [1.0] * 3), sla("max < 5s", [1.0] * 3)]
    found = gate(run_of({"default": {}}, slas, repeats=3))
    assert found.notes[0] == "needs --repeat 19 for all of 2 open clauses, in a separate run"
    assert (
        found.clauses[0].detail
        == "median: not a bound: 3 arms of at least 5; needs n=5: --repeat 5 would settle it if"
        " none breaks it"
    )
    assert "--repeat 19 " in found.reason, "the first line names the clause that needs most"
    never = gate(run_of({"default": {}}, [*slas, sla("mean < 2s", [1.0] * 3)], repeats=3))
    assert "mean < 2s" in never.reason, "which no number of repeats settles"
    assert never.notes[0] == "1 of 3 open clauses would be settled by no number of repeats"
