"""Metrics with known answers, on logs whose every time is known."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.support import arms, logs
from tests.support.arms import CLEAN, control
from tests.support.logs import MS, Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.incident import PHASE_NAMES
from trainchaos.harness.judge.measure.measure import (
    METRICS,
    measure,
    summarise,
)
from trainchaos.harness.judge.measure.partition import CLASSES
from trainchaos.harness.judge.record.lineage import history_of


@pytest.mark.parametrize("name", CLEAN)
def test_phases_sum_to_the_recovery_time(name: str) -> None:
    script = CLEAN[name][0]()
    for incident in measure(script.log(), control(script.strategy).log()).incidents:
        if not incident.phases:
            continue
        assert tuple(span.name for span in incident.phases) == PHASE_NAMES
        assert sum(span.seconds for span in incident.phases) == pytest.approx(
            incident.recovery_time, abs=1e-9
        )
        for before, after in itertools.pairwise(incident.phases):
            assert after.start == pytest.approx(before.start + before.seconds, abs=1e-9)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CLEAN)
def test_goodput_and_badput_make_the_wall_time(name: str) -> None:
    script = CLEAN[name][0]()
    split = measure(script.log(), control(script.strategy).log()).partition
    assert set(split.badput) == set(CLASSES)
    assert all(seconds >= 0 for seconds in split.badput.values())
    assert split.useful_s + sum(split.badput.values()) == pytest.approx(split.wall_s, rel=1e-9)
    assert split.residual_s == pytest.approx(0, abs=1e-9)


def test_a_run_faster_than_its_control_earns_only_the_time_it_took() -> None:
    split = measure(
        arms.hot_spare().log(), control("hot-spare", spares=1, step_ms=80).log()
    ).partition
    assert split.residual_s == pytest.approx(0, abs=1e-9)
    assert split.useful_s == pytest.approx(split.productive_s * 4 / 5)


def test_straggling_time_is_named() -> None:
    split = measure(arms.straggler().log(), control("hot-spare", spares=1).log()).partition
    assert split.badput["straggling"] == pytest.approx(6 * 0.04 * 4 / 5, abs=5e-3)


def test_degraded_world_time_is_named() -> None:
    script = arms.interrupted("drop-replica")
    arms.park(script, ("w0", "w1", "w3"))
    script.form(("w0", "w1", "w3"), state="peer", cause="failure", resume=26)
    script.step_ns = 70 * MS
    script.train(logs.STEPS)
    script.finish(healed=["kill"])
    found = measure(script.log(), control("drop-replica").log())
    assert found.incidents[0].outcome == "degraded"
    assert found.partition.badput["degraded_world"] == pytest.approx(14 * 0.02, abs=2e-3)
    assert found.values["time_to_full_rate"] == [math.inf]


def test_a_step_applied_by_some_counts_once_the_others_have_copied_it() -> None:
    history = history_of(arms.drop_replica(mixed=True).log())
    run = history.lineage[27]
    assert (run.generation, len(run.commits), len(run.batches)) == (1, 2, 4)
    assert run.committed_ns == history.generations[1].ready_ns
    (incident,) = measure(arms.drop_replica(mixed=True).log(), None).incidents
    assert (incident.first_new_step, incident.steps_lost) == (28, 0)


def test_a_step_applied_by_some_and_rolled_back_was_never_committed() -> None:
    script = arms.interrupted("checkpoint-restart", committers=("w0",))
    script.form(
        ("w0", "w1", "w3"), state="checkpoint", cause="failure", resume=20, checkpoint="step-20"
    )
    script.train(30)
    script.finish()
    history = history_of(script.log())
    assert (
        next(run for run in history.runs if (run.generation, run.step) == (1, 27)).committed_ns
        is None
    )
    assert {history.lineage[step].generation for step in range(1, 21)} == {1}
    assert {history.lineage[step].generation for step in range(21, 31)} == {2}
    assert measure(script.log(), None).incidents[0].steps_lost == 7


def test_a_restore_discards_what_lay_beyond_it_even_before_the_next_step() -> None:
    script = arms.interrupted("checkpoint-restart")
    script.form(
        ("w0", "w1", "w3"), state="checkpoint", cause="failure", resume=20, checkpoint="step-20"
    )
    assert history_of(script.log()).committed_step == 20


def test_failed_attempts_belong_to_regroup() -> None:
    script = arms.interrupted("hot-spare", spares=1)
    arms.park(script, ("w0", "w1", "w3"))
    script.generation += 1
    script.orchestrator(
        Kind.GENERATION_STARTED,
        members=["w0", "w1", "s0", "w3"],
        state="peer",
        source="w0",
        cause="failure",
    )
    script.now += 300 * MS
    arms.spare_joins(script)
    script.train(logs.STEPS)
    script.finish(healed=["kill"])
    (incident,) = measure(script.log(), None).incidents
    regroup = next(span.seconds for span in incident.phases if span.name == "regroup")
    assert regroup == pytest.approx(0.312, abs=2e-3)


@pytest.mark.parametrize(
    ("outcome", "detected", "expected"),
    [("gave-up", True, "fail-stop"), ("timed-out", True, "hang"), ("timed-out", False, "hang")],
)
def test_what_never_recovers_takes_for_ever(outcome: str, detected: bool, expected: str) -> None:
    script = arms.interrupted("hot-spare", spares=1)
    script.finish(outcome, healed=["kill"])
    if not detected:
        script.drop(Kind.FAILURE_DETECTED)
    found = measure(script.log(), control("hot-spare").log())
    assert found.incidents[0].outcome == expected
    assert found.values["recovery_time"] == [math.inf]
    assert found.values["time_to_full_rate"] == [math.inf]
    assert found.partition.residual_s == pytest.approx(0, abs=1e-9)


def test_what_was_cut_short_says_nothing_about_recovery() -> None:
    found = measure(arms.interrupted("hot-spare").log(), control("hot-spare").log())
    names = ("recovery_time", "time_to_full_rate", "goodput")
    assert [found.values[name] for name in names] == [[], [], []]
    assert found.values["detection_time"] == pytest.approx([0.007])


def test_what_did_not_land_gives_no_values() -> None:
    script = arms.hot_spare()
    script.drop(Kind.FAULT_LANDED)
    found = measure(script.log(), None)
    assert found.incidents[0].outcome == "not-landed"
    assert [found.values[name] for name in ("recovery_time", "detection_time", "steps_lost")] == [
        [],
        [],
        [],
    ]


def test_masked_and_escaped_corruption() -> None:
    same = arms.bitflip()
    assert measure(same.log(), control("hot-spare").log()).incidents[0].outcome == "sdc-escape"
    assert measure(same.log(), same.log()).incidents[0].outcome == "masked"


def test_dead_spare_does_not_concern_the_job() -> None:
    script = Script("hot-spare", spares=1)
    arms.plan(script, process="s0")
    script.train(20)
    arms.inject(script, process="s0")
    script.exit("s0", signal=9, expected=False)
    script.orchestrator(
        Kind.FAILURE_DETECTED,
        failure=1,
        cause="exit",
        process="s0",
        rank=None,
        detail="killed by signal 9",
    )
    script.train(logs.STEPS)
    (incident,) = measure(script.finish(healed=["kill"]).log(), None).incidents
    assert (incident.outcome, incident.recovery_time, incident.detected_by) == (
        "masked",
        None,
        "exit",
    )


def test_two_faults_at_once_keep_their_own_failures() -> None:
    script = Script("drop-replica")
    script.train(26)
    script.take(27)
    arms.inject(script, "a", process="w2", rank=2)
    arms.inject(script, "b", process="w1", rank=1)
    arms.fail(script, "w1", 1)
    arms.fail(script, "w2", 2)
    script.form(("w0", "w3"), state="peer", cause="failure", resume=26)
    script.train(logs.STEPS)
    found = measure(script.finish().log(), None)
    assert [(e.fault, e.failure.data["process"]) for e in found.episodes if e.failure] == [
        ("a", "w2"),
        ("b", "w1"),
    ]


def test_infinity_survives_a_summary() -> None:
    metric = summarise("recovery_time", [0.1, math.inf, 0.2])
    assert (metric.median, metric.max, metric.n) == (0.2, math.inf, 3)
    assert metric.model_validate_json(metric.model_dump_json()) == metric


UNITS = (
    "s",
    "steps",
    "samples",
    "saves",
    "alarms",
    "replicas",
    "ratio",
    "samples/s",
    "rank-hours",
)


def test_every_metric_explains_itself() -> None:
    assert all(known.doc and known.unit in UNITS for known in METRICS.values())


@pytest.mark.parametrize("outcome", ["gave-up", "timed-out"])
def test_a_job_that_did_not_finish_has_lost_everything(outcome: str) -> None:
    script = arms.interrupted("hot-spare", spares=1)
    script.finish(outcome, healed=["kill"])
    found = measure(script.log(), control("hot-spare").log())
    assert found.partition.useful_s > 0
    assert found.values["goodput"] == [0.0] and found.values["steps_lost"] == [math.inf]
