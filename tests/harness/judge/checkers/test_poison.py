"""A sample that nobody can compute is found, left out and accounted for, whatever the strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.sim.test_sim import DROP, RESTART_ALL, SPARE, STRATEGIES, found, of
from tests.support.arms import judged
from tests.support.portions import first_in_test, long_but
from tests.support.search.simulate import BATCH, KILL, SAMPLES, cell_of, evidence, play
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.measure.measure import account
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.sim.rank.faults import SimFaultAgent
from trainchaos.recovery.data.order import batch


def poison(step: int = 33, **more: Any) -> dict[str, Any]:
    """From this step on."""
    return {
        "id": "p",
        "kind": "poison-sample",
        "target": {"select": "all"},
        "at": {"step": step},
        **more,
    }


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", long_but(STRATEGIES, SPARE, RESTART_ALL))
@pytest.mark.parametrize("seed", first_in_test(3, 1))
def test_it_is_found_at_the_second_failure_and_left_out(
    recovery: str, seed: int, memory: Path
) -> None:
    faulted, problems = found(cell_of(recovery, [poison()], steps=100), memory, seed)
    assert (faulted.outcome, problems) == ("completed", {})
    (skipped,) = of(faulted, Kind.SAMPLES_SKIPPED)
    (sample,) = skipped.data["samples"]
    assert sample in batch(33, BATCH, SAMPLES, seed)
    assert skipped.data["since"] == 33
    assert len({event.generation for event in of(faulted, Kind.NONFINITE_CAUGHT)}) == 2
    accounting = account(history_of(faulted.log))
    due = sum(batch(step, BATCH, SAMPLES, seed).count(sample) for step in range(33, 101))
    assert (accounting.lost, accounting.skipped) == (0, due)
    taken = [
        s for e in of(faulted, Kind.BATCH_TAKEN) if (e.step or 0) > 33 for s in e.data["samples"]
    ]
    assert sample not in taken, "in later epochs too"
    assert due >= 2, "the data set is gone through more than once"


@pytest.mark.slow
@pytest.mark.parametrize("recovery", long_but(STRATEGIES, DROP))
def test_who_joins_later_leaves_it_out_too(recovery: str, memory: Path) -> None:
    kill = {**KILL, "at": {"step": 45}}
    faulted, problems = found(cell_of(recovery, [poison(23), kill]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert len(of(faulted, Kind.SAMPLES_SKIPPED)) == 1


@pytest.mark.slow
def test_a_restore_from_before_the_decision_redoes_those_steps_with_the_sample(
    memory: Path,
) -> None:
    """It was computed in an earlier epoch, before it went bad: a decision holds from its
    step on.
    """
    seed = 3
    sample = batch(33, BATCH, SAMPLES, seed)[0]
    faulted, problems = found(
        cell_of(RESTART_ALL, [poison(33, params={"sample": sample})], every=30), memory, seed
    )
    assert (faulted.outcome, problems) == ("completed", {})


@pytest.mark.slow
@pytest.mark.parametrize("recovery", long_but(STRATEGIES, SPARE))
def test_two_of_them_in_one_step(recovery: str, memory: Path) -> None:
    due = batch(33, BATCH, SAMPLES, 3)
    faults = [
        {**poison(params={"sample": due[place]}), "id": f"p{place}"} for place in (0, BATCH - 1)
    ]
    faulted, problems = found(cell_of(recovery, faults), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert sorted(
        s for e in of(faulted, Kind.SAMPLES_SKIPPED) for s in e.data["samples"]
    ) == sorted([due[0], due[-1]])


@pytest.mark.slow
def test_too_many_of_them_end_the_job_with_a_clear_word(memory: Path) -> None:
    due = batch(33, BATCH, SAMPLES, 3)
    faults = [
        {**poison(params={"sample": s}, expect={"outcome": "fail-stop"}), "id": f"p{s}"}
        for s in due[:18]
    ]
    faulted, _ = found(cell_of(DROP, faults), memory, 3)
    assert faulted.outcome == "gave-up"
    assert "the data or the model are broken" in of(faulted, Kind.RUN_FINISHED)[0].data["reason"]
    assert not of(faulted, Kind.SAMPLES_SKIPPED)


@pytest.mark.slow
def test_a_step_that_fails_again_for_another_reason_costs_no_sample(memory: Path) -> None:
    nan = {
        "id": "nan",
        "kind": "tensor-corrupt",
        "params": {"surface": "gradient"},
        "target": {"rank": 2},
        "at": {"step": 33},
        "retrigger": {"max": 2},
    }
    faulted, problems = found(cell_of(SPARE, [nan]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    assert not of(faulted, Kind.SAMPLES_SKIPPED)


@pytest.mark.slow
def test_a_decision_that_nobody_wrote_down_or_that_nothing_justifies_is_noticed(
    memory: Path,
) -> None:
    cell = cell_of(SPARE, [poison()])
    faulted, control = (play(cell, memory / arm, seed=3, arm=arm) for arm in ("faulted", "control"))
    unsaid = [e for e in faulted.log.events if e.kind is not Kind.SAMPLES_SKIPPED]
    (said,) = of(faulted, Kind.SAMPLES_SKIPPED)
    elsewhere = [
        replace(e, data={**e.data, "since": 35}) if e is said else e for e in faulted.log.events
    ]
    for events in (unsaid, elsewhere):
        spoilt = replace(faulted, log=replace(faulted.log, events=tuple(events)))
        red = {name for name, f in judged(evidence(spoilt, control)).items() if f.verdict == "fail"}
        assert "sample-accounting" in red


@pytest.mark.slow
def test_a_poison_that_is_none_is_noticed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimFaultAgent, "poison_sample", lambda self, sample: None)
    _, problems = found(cell_of(SPARE, [poison(10)]), memory, 3)
    assert set(problems) == {"fault-landed"}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", long_but(STRATEGIES, DROP, RESTART_ALL))
@pytest.mark.parametrize("kind", long_but(["process-kill", "process-stop"], "process-kill"))
@pytest.mark.parametrize(
    ("event", "nth"), [("recovery_started", 1), ("recovery_started", 2), ("regroup", 2)]
)
def test_somebody_is_lost_while_it_is_looked_for(
    recovery: str, kind: str, event: str, nth: int, memory: Path
) -> None:
    lost = {"id": "k", "kind": kind, "target": {"rank": 0}, "at": {"event": event, "nth": nth}}
    faulted, problems = found(cell_of(recovery, [poison(23), lost]), memory, 2)
    assert (faulted.outcome, problems) == ("completed", {})
    assert len(of(faulted, Kind.SAMPLES_SKIPPED)) == 1
