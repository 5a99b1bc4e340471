"""What a supervisor measures of a job's recoveries, and what stands for it before."""

from __future__ import annotations

import pytest

from trainchaos.recovery.policy import costs as costs_module
from trainchaos.recovery.policy.costs import SPAN_S, CostMeter, Costs, Figure
from trainchaos.recovery.policy.interval import PRIOR_MTBF_S


def found(meter: CostMeter, *, now_s: float = 100.0) -> Costs:
    """What it says."""
    return meter.costs(now_s=now_s, committed=7, steps=20)


def test_before_anything_is_seen_there_are_priors_that_say_so() -> None:
    costs = found(CostMeter())
    parts = (costs.form_s, costs.copy_s, costs.start_s, costs.restore_s, costs.save_s)
    assert all(part.n == 0 and part.value > 0 for part in parts)
    assert costs.step_s == {}
    assert costs.step_with(4) == costs_module.PRIOR_STEP_S
    assert costs.mtbf_s == PRIOR_MTBF_S
    assert costs.left() == 13


def test_each_part_is_the_median_of_what_was_seen() -> None:
    meter = CostMeter()
    for seconds in (1.0, 5.0, 2.0):
        meter.started(seconds)
    meter.formed("form", 0.5)
    meter.formed("copy", 0.75)
    meter.formed("restore", 2.5)
    meter.saving("a", "saving", 10.0)
    meter.saving("a", "committed", 13.0)
    costs = found(meter)
    assert costs.start_s == Figure(2.0, 3)
    assert costs.form_s == Figure(0.5, 1)
    assert costs.copy_s == Figure(0.25, 1), "beyond forming the group"
    assert costs.restore_s == Figure(2.0, 1)
    assert costs.save_s == Figure(3.0, 1)


def test_a_restore_is_taken_for_as_long_as_a_save_until_one_was_seen() -> None:
    meter = CostMeter()
    meter.saving("a", "saving", 10.0)
    meter.saving("a", "committed", 13.0)
    assert found(meter).restore_s == Figure(3.0 + costs_module.PRIOR_COPY_S, 0)


def test_a_save_that_failed_or_was_displaced_is_not_measured() -> None:
    meter = CostMeter()
    meter.saving("a", "saving", 10.0)
    meter.saving("b", "saving", 11.0)
    meter.saving("a", "committed", 20.0)
    meter.saving("b", "failed", 21.0)
    assert found(meter).save_s.n == 0


def test_steps_are_measured_by_the_size_of_the_world_over_spans() -> None:
    meter = CostMeter()
    for look in range(0, 101):  # 20 ms looks, steps of 50 ms
        now_s = look * 0.02
        meter.saw(4, int(now_s / 0.05), now_s)
    meter.saw(3, 40, 2.0)
    meter.saw(3, 42, 2.0 + SPAN_S)
    costs = found(meter)
    assert costs.step_s[4].value == pytest.approx(0.05, rel=0.1)
    assert costs.step_s[4].n >= 36
    assert costs.step_s[3] == Figure(pytest.approx(SPAN_S / 2), 2)


def test_a_span_does_not_go_on_over_a_failure() -> None:
    meter = CostMeter()
    meter.saw(4, 1, 0.0)
    meter.failed()
    meter.saw(4, 2, 50.0)
    assert found(meter).step_s == {}
    assert found(meter).failures == 1
    assert found(meter, now_s=100.0).mtbf_s == (PRIOR_MTBF_S + 100.0) / 2


def test_a_world_not_seen_yet_is_told_from_the_nearest() -> None:
    costs = Costs(step_s={4: Figure(1.0, 9), 2: Figure(5.0, 9)})
    assert costs.step_with(3, shrinks=True) in (1.0, 5.0)
    assert costs.step_with(8) == pytest.approx(0.5), "twice as many ranks share the batch"
    assert costs.step_with(8, shrinks=True) == 1.0
    assert costs.step_with(4) == 1.0


def test_a_generation_that_another_supervisor_formed_counts_with_its_own_size() -> None:
    """The one that took over is told of no generation that begins."""
    meter = CostMeter()
    meter.saw(2, 1, 0.0)
    meter.saw(2, 2, SPAN_S)
    assert found(meter).step_s == {2: Figure(SPAN_S, 1)}
    assert found(meter, now_s=SPAN_S).watched_s == SPAN_S


def test_a_generation_of_the_same_size_begins_a_span_of_its_own() -> None:
    meter = CostMeter()
    meter.saw(2, 1, 0.0)
    meter.trains()
    meter.saw(2, 2, 50.0)
    assert found(meter).step_s == {}


def test_only_rewinds_are_counted_as_such() -> None:
    meter = CostMeter()
    meter.saw(4, 1, 10.0)
    for _ in range(3):
        meter.failed()
    meter.rewound()
    meter.recalled()
    costs = found(meter, now_s=110.0)
    rewinds = costs.rewinds
    assert (rewinds.count, rewinds.failures, rewinds.watched_s) == (1, 3, 100.0)
    assert rewinds.recalled == 1
    assert rewinds.mtbf_s == (PRIOR_MTBF_S + 100.0) / 2
    assert costs.mtbf_s == (PRIOR_MTBF_S + 100.0) / 4
