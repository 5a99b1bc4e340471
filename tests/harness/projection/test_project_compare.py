"""Projected against measured goodput: jobs that are played here, step by step, by plain loops."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages.sample_results import build
from trainchaos.chaos import cli
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.judge.incident import Incident, PhaseSpan
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.harness.projection.compare import compare, job_of
from trainchaos.harness.projection.costs import PUBLISHED, alone
from trainchaos.harness.projection.observed import Stored, groups
from trainchaos.harness.projection.projection import project
from trainchaos.harness.projection.result import Projection, Setting
from trainchaos.reports.projection import page, words

SCENARIO = Path(__file__).parents[3] / "scenarios/projection/projection-mtbf.yaml"
STEP_S, BASE, STALL_S, MTBF_S = 0.02, 0.9, 0.3, 2.5
RANKS = 4


@cache
def all_cells() -> tuple[Cell, ...]:
    """Of the scenario."""
    return tuple(load(SCENARIO, cli.build_catalogue()).cells)


@cache
def sample() -> Results:
    """Of a run."""
    return build(Path("unused"), logs=False)[1]


def cells(*strategies: str) -> list[Cell]:
    """Those of the scenario at 4 ranks."""
    return [
        cell
        for cell in all_cells()
        if cell.exact_for is None
        and cell.scenario.workload.ranks == RANKS
        and cell.scenario.recovery.strategy in strategies
    ]


def arm(cell: Cell, repeat: int, kind: str, times: dict[str, float]) -> ArmResult:
    """An arm with these seconds by class, ``useful`` among them; a spare beside four ranks."""
    share = RANKS / (RANKS + 1)
    times = {**times, "initialisation": 1.0, "shutdown": 0.5}
    wall_s = sum(times.values())
    badput = {name: seconds * share for name, seconds in times.items() if name != "useful"}
    return ArmResult(
        id=f"{cell.id}.r{repeat}.{kind}",
        cell=cell.id,
        repeat=repeat,
        arm="control" if kind == "control" else "faulted",
        seed=repeat,
        events="",
        outcome="completed",
        reason="",
        wall_s=wall_s,
        committed_step=1,
        steps=1,
        goodput=None,
        badput=badput | {"spare_idle": wall_s * (1 - share)},
        useful_s=times["useful"] * share,
        residual_s=0.0,
        step_time_median=STEP_S,
        provisioned_ranks=RANKS + 1,
        invariants={},
    )


def incident(cell: Cell, repeat: int, at_s: float, stall_s: float, **more: Any) -> Incident:
    """One that was recovered from."""
    known: dict[str, Any] = {
        "fault": "wear",
        "kind": "process-kill",
        "cell": cell.id,
        "repeat": repeat,
        "occurrence": 0,
        "target": {},
        "step": 1,
        "injected_s": at_s,
        "landed": True,
        "witness": None,
        "evidence": {},
        "healed": True,
        "detected_by": "exit",
        "blamed_rank": 0,
        "detection_time": 0.0,
        "recovery_time": stall_s,
        "outcome": "recovered",
        "phases": [PhaseSpan(name="regroup", start=0.0, seconds=stall_s)],
        "steps_lost": 0,
        "restored_step": None,
        "first_new_step": 2,
        "decision": "",
    }
    return Incident(**(known | more))


def play(cell: Cell, repeat: int, *, slower: float = 1.0) -> tuple[ArmResult, list[Incident]]:
    """Step by step: a failure comes at random by the clock, costs the step under way, or all since
    the last checkpoint, and a stall; ``slower``: what the projection does not know of.
    """
    chance = random.Random(repeat * 1000 + len(cell.id))
    rollback = cell.scenario.recovery.strategy == "checkpoint-restart"
    scenario = cell.scenario.workload
    every = scenario.checkpoint.every if rollback else 1
    assert isinstance(every, int)
    took_s = STEP_S / BASE
    now_s, stall_s, again_s, step = 0.0, 0.0, 0.0, 0
    due_s = chance.expovariate(1 / MTBF_S)
    found = []
    while step < scenario.steps:
        if now_s + took_s <= due_s:
            now_s, step = now_s + took_s, step + 1
            continue
        kept = step - step % every
        again_s += (step - kept) * took_s + max(0.0, due_s - now_s)
        step, now_s = kept, max(now_s, due_s)
        one_s = STALL_S * chance.uniform(0.8, 1.2)
        away_s = {"time_to_redundancy": one_s + 0.01}
        found.append(incident(cell, repeat, now_s, one_s, occurrence=len(found), **away_s))
        now_s, stall_s = now_s + one_s, stall_s + one_s
        due_s += chance.expovariate(1 / MTBF_S)
    useful_s = scenario.steps * STEP_S
    times = {"recomputation": again_s, "regroup": stall_s, "useful": useful_s / slower}
    times["other"] = now_s - again_s - stall_s - times["useful"]
    return arm(cell, repeat, "faulted", times), found


def stored(
    *strategies: str, repeats: int = 20, run: str = "one", slower: float = 1.0, **changed: Any
) -> Stored:
    """A run of the scenario's jobs at 4 ranks."""
    arms, faults = [], []
    chosen = cells(*(strategies or ("hot-spare", "checkpoint-restart")))
    for cell in chosen:
        for repeat in range(repeats):
            useful_s = cell.scenario.workload.steps * STEP_S
            times = {"useful": useful_s, "other": useful_s * (1 / BASE - 1)}
            faulted, incidents = play(cell, repeat, slower=slower if repeat % 2 else 1.0)
            arms += [arm(cell, repeat, "control", times), faulted]
            faults += incidents
    known = {"scenario": "projection-mtbf", "run_id": run, "cells": []}
    results = sample().model_copy(update={**known, "arms": arms, "faults": faults, **changed})
    resolved = ResolvedRun(
        run_id=run, source="", started="", reproduce="", seed=1, cells=chosen, skipped=[]
    )
    return Stored(path=Path(run), results=results, resolved=resolved)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_jobs_that_go_as_the_model_says_are_within_the_interval_and_others_are_not() -> None:
    found, cautions = compare([stored()], [], 0)
    assert {one.strategy for one in found} == {"hot-spare", "checkpoint-restart"}
    assert all(one.inside and abs(one.residual) < 0.02 for one in found) and not cautions
    assert all(len(one.measured) == 10 and one.high - one.low < 0.1 for one in found)
    for one in found:
        assert one.failures_projected == pytest.approx(one.failures_measured, rel=0.25)
        assert one.stall_s == pytest.approx(STALL_S, rel=0.05)
        assert one.undisturbed == pytest.approx(BASE)
    slower, _ = compare([stored(slower=1.2)], [], 0)
    assert not any(one.inside for one in slower) and all(one.residual < -0.05 for one in slower)


@pytest.mark.slow
def test_no_arm_is_projected_from_itself() -> None:
    """What the compared arms measured changes nothing of what is projected; others' costs do."""
    one, slower = (compare([stored(slower=by)], [], 0)[0] for by in (1.0, 1.3))
    assert [x.projected for x in one] == [x.projected for x in slower]
    assert [x.measured for x in one] != [x.measured for x in slower]
    dearer = stored(run="other")
    arms = [
        x.model_copy(update={"badput": x.badput | {"regroup": 3 * x.badput.get("regroup", 0.0)}})
        for x in dearer.results.arms
    ]
    dearer = replace(dearer, results=dearer.results.model_copy(update={"arms": arms}))
    by_others, _ = compare([stored()], [dearer], 0)
    assert all(b.projected < a.projected - 0.05 for a, b in zip(one, by_others, strict=True))
    assert {x.costs_from for x in by_others} == {"other runs"}
    assert all(len(x.measured) == 20 for x in by_others)


def test_a_replacement_that_never_came_has_no_time() -> None:
    run = stored("hot-spare", repeats=2)
    first, *rest = run.results.faults
    faults = [first.model_copy(update={"time_to_redundancy": math.inf}), *rest]
    changed = replace(run, results=run.results.model_copy(update={"faults": faults}))
    (group,) = groups([changed]).values()
    assert len(group.away_s) == len(rest) and all(math.isfinite(x) for x in group.away_s)


def test_ranks_that_share_processors_lose_less_than_their_share() -> None:
    run = stored("drop-replica", repeats=4)
    (group,) = groups([run]).values()
    away_s = 1.2
    for lost, slowing in ((0.0, 0.0), (0.5, 0.5), (7.0, 1.0)):
        missing_s = group.failures * (away_s - STALL_S) / RANKS
        each = replace(group.faulted[0], failures=group.failures, degraded_s=lost * missing_s)
        source = replace(
            group,
            faulted=[replace(each, stalled_s=STALL_S * group.failures)],
            away_s=[away_s],
        )
        assert job_of(group, source).slowing == pytest.approx(slowing)


def _halted(run: Stored) -> Stored:
    arms = [
        x.model_copy(update={"outcome": "halted"}) if x.id.endswith("r1.faulted") else x
        for x in run.results.arms
    ]
    return replace(run, results=run.results.model_copy(update={"arms": arms}))


def test_arms_that_did_not_complete_few_incidents_and_caps_are_said() -> None:
    found, cautions = compare([_halted(stored(repeats=4))], [], 0)
    assert all(len(one.measured) == 1 and one.measured_low is None for one in found)
    assert "r1.faulted (halted)" in " ".join(cautions)
    run = stored("hot-spare", repeats=4)
    kept = [one for one in run.results.faults if one.occurrence < 1]
    few = replace(run, results=run.results.model_copy(update={"faults": kept}))
    assert "fewer than 5 incidents" in compare([few], [], 0)[1][0]
    many = [one for one in run.results.faults if one.repeat == 1][:1] * 100
    full = [*(one for one in run.results.faults if one.repeat != 1), *many]
    capped = replace(run, results=run.results.model_copy(update={"faults": full}))
    assert "the most failures that its scenario allows (100)" in compare([capped], [], 0)[1][0]


def _without(run: Stored, kind: str) -> Stored:
    arms = [one for one in run.results.arms if one.arm != kind]
    return replace(run, results=run.results.model_copy(update={"arms": arms}))


def _by_step(run: Stored) -> Stored:
    changed = []
    for cell in run.resolved.cells:
        (fault,) = cell.scenario.faults
        at = fault.at.model_copy(update={"mtbf": None, "step": 5})
        faults = [fault.model_copy(update={"at": at})]
        scenario = cell.scenario.model_copy(update={"faults": faults})
        changed.append(cell.model_copy(update={"scenario": scenario}))
    return replace(run, resolved=run.resolved.model_copy(update={"cells": changed}))


@pytest.mark.parametrize(
    ("runs", "others", "says"),
    [
        (lambda: [stored()], lambda: [stored()], "compared with itself"),
        (lambda: [stored()], lambda: [stored(run="b", scenario="c")], "different scenarios: c, p"),
        (lambda: [_without(stored(), "control")], list, "no control arm"),
        (lambda: [stored(repeats=1)], list, "no arm to compare with"),
        (lambda: [stored(faults=[])], list, "no recovery in the arms of even repeats"),
        (lambda: [stored()], lambda: [stored("hot-spare", run="b")], "no recovery in the runs"),
        (lambda: [_by_step(stored())], list, "one that comes at random"),
        (lambda: [replace(stored(), resolved=_none())], list, "no run has a strategy"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    runs: Callable[[], list[Stored]], others: Callable[[], list[Stored]], says: str
) -> None:
    with pytest.raises(ScenarioError, match=says) as raised:
        compare(runs(), others(), 0)
    assert raised.value.exit_code == 2


def _none() -> ResolvedRun:
    return ResolvedRun(run_id="", source="", started="", reproduce="", seed=1, cells=[])


def test_failures_that_overlap_are_no_measure_of_one() -> None:
    cell = cells("hot-spare")[0]
    first, within = incident(cell, 0, 1.0, 0.5), incident(cell, 0, 1.4, 0.5)
    later, other = incident(cell, 0, 3.0, 0.5), incident(cell, 1, 1.2, 0.5)
    answered = incident(cell, 1, 9.0, 0.1, answered_with="wear")
    never = incident(cell, 2, 1.0, math.inf, outcome="hang")
    after = incident(cell, 2, 50.0, 0.5)
    found = alone([first, within, later, other, answered, never, after])
    assert found == [later, other]


@pytest.mark.slow
def test_the_comparison_is_printed_and_drawn() -> None:
    from trainchaos.chaos.commands.project import lines

    compared, cautions = compare([stored(slower=1.2)], [], 0)
    setting = Setting(gpus=(64,), rate=6.5, days=1, trials=5, spares=1)
    found = project(setting, PUBLISHED, "a test")
    assert "Projected against measured" not in page.render(found)
    found = found.model_copy(update={"compared": compared, "cautions": cautions})
    text, said = page.render(found), "\n".join(lines(found))
    assert "Projected against measured" in text and "<svg" in text
    for one in compared:
        for figure in (f"{one.projected:.4f}", f"{one.mean:.4f}", f"{one.residual:+.4f}"):
            assert figure in text and figure in said
    assert "OUTSIDE" in said and words.compared_said(found).startswith("0 of 2 jobs")
    assert Projection.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("repeats", "controls", "says"),
    [
        (2, 1, "(1 with failures for the costs, 1 control): that is not known at all"),
        (2, 2, "(1 with failures for the costs, 2 control): the intervals are very wide"),
        (4, 4, "(2 with failures for the costs, 4 control): the intervals are very wide"),
        (6, 6, ""),
    ],
)
def test_too_few_arms_to_know_how_they_differ_are_said(
    repeats: int, controls: int, says: str
) -> None:
    run = stored("hot-spare", repeats=repeats)
    arms = [x for x in run.results.arms if x.arm != "control" or x.repeat < controls]
    _, cautions = compare(
        [replace(run, results=run.results.model_copy(update={"arms": arms}))], [], 0
    )
    few = [one for one in cautions if "say how arms differ" in one]
    assert len(few) == bool(says) and all(f"hot-spare at 4 ranks {says}" in one for one in few)
