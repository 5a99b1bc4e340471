"""When a checkpoint is due; Daly's optimum against a search for the minimum of his cost
function.
"""

from __future__ import annotations

import math

import pytest

from trainchaos.recovery.policy.interval import (
    PRIOR_MTBF_S,
    DalyInterval,
    Interval,
    Rewinds,
    SaveHistory,
    SaveSchedule,
    SaveSchedules,
    Seconds,
    Steps,
    Wanted,
    counts,
    optimum_s,
    parse,
    schedules,
)

START = SaveHistory(saved_s=100.0, since_s=100.0)


def due_at(interval: Interval, history: SaveHistory, *, steps: int, step_s: float) -> list[int]:
    """Steps after which a save is made, each of which costs nothing and takes no time."""
    found = []
    for step in range(1, steps + 1):
        now_s = 100.0 + step * step_s
        if interval.due(step, now_s, history):
            found.append(step)
            history = history.saved(now_s, history.cost_s or 0.5)
    return found


def test_steps_are_counted_from_the_start_of_the_job() -> None:
    assert due_at(Steps(25), START, steps=80, step_s=1.0) == [25, 50, 75]


def test_seconds_are_counted_from_the_last_save() -> None:
    assert due_at(Seconds(10), START, steps=40, step_s=3.0) == [
        4,
        8,
        12,
        16,
        20,
        24,
        28,
        32,
        36,
        40,
    ]


def test_auto_measures_first_and_then_keeps_to_the_optimum() -> None:
    found = due_at(DalyInterval(100.0), START, steps=40, step_s=1.0)
    assert found[0] == 1
    gap = math.ceil(optimum_s(0.5, 100.0))
    assert found[1:3] == [1 + gap, 1 + 2 * gap]


def test_auto_saves_more_often_the_more_failures_were_seen() -> None:
    calm = START.saved(100.0, 1.0)
    rough = calm
    for _ in range(20):
        rough = rough.failed()
    now_s = 100.0 + optimum_s(1.0, rough.mtbf_s(200.0)) + 1
    assert DalyInterval().due(5, now_s, rough)
    assert not DalyInterval().due(5, now_s, calm)


def test_the_mtbf_observed_starts_at_the_prior_and_follows_what_is_seen() -> None:
    assert START.mtbf_s(100.0) == PRIOR_MTBF_S
    seen = SaveHistory(saved_s=0.0, since_s=0.0, failures=99, watched_s=1000.0)
    assert seen.mtbf_s(99_000.0) == pytest.approx((PRIOR_MTBF_S + 100_000.0) / 100)


def wall_s(work_s: float, segment_s: float, cost_s: float, mtbf_s: float) -> float:
    """Daly 2006, equation 20 (no restart time): the expected time to solution."""
    return mtbf_s * (math.exp((segment_s + cost_s) / mtbf_s) - 1) * work_s / segment_s


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s"),
    [(0.05, 600.0), (1.0, 3600.0), (30.0, 3600.0), (300.0, 3600.0), (60.0, 120.0)],
)
def test_the_formula_is_within_a_percent_of_the_best_time_to_solution(
    cost_s: float, mtbf_s: float
) -> None:
    candidates = [cost_s / 10 * 1.01**n for n in range(1500)]
    best = min(
        wall_s(1e6, segment, cost_s, mtbf_s) for segment in candidates if segment < 30 * mtbf_s
    )
    assert wall_s(1e6, optimum_s(cost_s, mtbf_s), cost_s, mtbf_s) <= 1.01 * best


def test_where_saving_takes_longer_than_failures_are_apart_it_is_the_mtbf() -> None:
    assert optimum_s(20.0, 10.0) == 10.0


def test_the_cost_is_the_mean_of_the_saves_seen() -> None:
    history = START.saved(1.0, 2.0).saved(2.0, 4.0)
    assert (history.cost_s, history.saves, history.saved_s) == (3.0, 2, 2.0)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        (25, Steps(25)),
        ("30s", Seconds(30.0)),
        ("1.5m", Seconds(90.0)),
        ("500ms", Seconds(0.5)),
        ("auto", DalyInterval(7.0)),
    ],
)
def test_what_people_write(text: int | str, interval: Interval) -> None:
    assert parse(text, 7.0) == interval


@pytest.mark.parametrize("text", [0, -3, "", "soon", "0s", "30", "-5s", "30 days"])
def test_what_is_no_interval_is_refused_with_what_would_be(text: int | str) -> None:
    with pytest.raises(
        ValueError, match="use a number of steps such as 25, a time such as 30s or 5m, or auto"
    ):
        parse(text)


# --- the timetable of a rank


def timetable(every: int | str) -> SaveSchedule:
    """Of a rank that starts at second 100."""
    return SaveSchedule(every, mtbf_s=None, now_s=100.0)


def test_a_save_that_was_asked_for_and_not_made_is_asked_for_again() -> None:
    """Rank 0 lost its generation, and has the step from a peer that applied it: the next one is
    saved.
    """
    table = timetable(10)
    assert not table.wants(9, 109.0) and table.wants(10, 110.0)
    table.lost()
    assert table.wants(11, 111.0)
    table.asked(111.0)
    assert not table.wants(12, 112.0) and table.wants(20, 120.0)


def test_a_save_waits_until_the_one_before_is_done() -> None:
    table = timetable(10)
    assert not table.wants(10, 110.0, busy=True)
    assert table.wants(11, 111.0)


def test_a_save_or_a_restore_begins_a_new_interval() -> None:
    table = timetable("30s")
    assert table.wants(3, 130.0)
    table.asked(131.0)
    assert not table.wants(6, 160.0) and table.wants(7, 161.0)
    table.restored(170.0)
    assert not table.wants(8, 199.0)


def test_failures_bring_saves_closer_together() -> None:
    calm, rough = timetable("auto"), timetable("auto")
    for table in (calm, rough):
        assert table.wants(1, 100.0), "to learn what one costs"
        table.asked(100.0)
        table.saved(100.0, 1.0)
    for _ in range(50):
        rough.lost()
    assert rough.wants(2, 130.0) and not calm.wants(2, 130.0)


def test_who_never_saves_never_asks() -> None:
    assert not any(timetable(0).wants(step, 1e9) for step in range(3))


@pytest.mark.parametrize(
    ("step", "every", "asked", "does"),
    [
        (10, 10, False, True),
        (11, 10, False, False),
        (11, 10, True, True),
        (5, 0, False, False),
        (5, "30s", False, False),
        (5, "30s", True, True),
    ],
)
def test_a_step_counts_as_saved_where_it_is_or_would_have_been(
    step: int, every: int | str, asked: bool, does: bool
) -> None:
    assert counts(step, every, asked=asked) is does


# --- failures that need a checkpoint


def test_only_failures_that_needed_a_checkpoint_bring_saves_closer_together() -> None:
    needed = Rewinds(count=9, failures=9, watched_s=1200.0)
    hardly = Rewinds(count=1, failures=9, watched_s=1200.0)
    assert needed.mtbf_s == (PRIOR_MTBF_S + 1200.0) / 10
    assert hardly.mtbf_s == (PRIOR_MTBF_S + 1200.0) / 2
    assert Rewinds(count=0, failures=9, watched_s=0.0).mtbf_s == PRIOR_MTBF_S, "never never"
    said = hardly.fields(0.5)
    assert said["every_s"] == round(optimum_s(0.5, hardly.mtbf_s), 3)
    assert said["every_s"] > 2 * needed.fields(0.5)["every_s"]


def test_what_the_supervisor_knows_counts_in_place_of_what_a_rank_saw() -> None:
    table = timetable("auto")
    assert table.wants(1, 100.0)
    table.asked(100.0)
    table.saved(100.0, 1.0)
    for _ in range(50):
        table.lost()
    assert table.wants(2, 130.0)
    table = timetable("auto")
    table.asked(100.0)
    table.saved(100.0, 1.0)
    for _ in range(50):
        table.lost()
    table.told(110.0, Rewinds(count=0, failures=50, watched_s=10.0))
    assert not table.wants(2, 130.0), "none of them needed a checkpoint"
    table.told(110.0, Rewinds(count=50, failures=50, watched_s=10.0))
    assert table.wants(2, 130.0)


def test_an_interval_that_was_given_stays() -> None:
    table = timetable("30s")
    table.told(100.0, Rewinds(count=10**6, failures=10**6, watched_s=1.0))
    assert not table.wants(1, 129.0) and table.wants(2, 130.0)


# --- both kinds


def both(memory: int | str, disk: int | str = 10) -> SaveSchedules:
    return schedules(disk=disk, memory=memory, mtbf_s=None, now_s=100.0)


def test_steps_between_checkpoints_in_memory_hold_whatever_the_disk_does() -> None:
    table = both(5)
    assert [table.wants(step, 100.0) for step in (4, 5, 10)] == [
        Wanted(),
        Wanted(memory=True),
        Wanted(disk=True, memory=True),
    ]
    assert both(0).memory is None and both(0).wants(10, 100.0) == Wanted(disk=True)
    assert both(5, disk=0).wants(10, 100.0) == Wanted(memory=True)


def learned(*, disk_s: float, memory_s: float) -> SaveSchedules:
    """Both kinds auto, at second 100, when one of each has shown what it costs."""
    table = both("auto", disk="auto")
    for step, cost_s in ((1, disk_s), (2, memory_s)):
        wants = table.wants(step, 100.0)
        assert wants == Wanted(disk=step == 1, memory=step == 2), "one after the other"
        table.asked(100.0, wants)
        kind = table.disk if wants.disk else table.memory
        assert kind is not None
        kind.saved(100.0, cost_s)
    return table


def saved(table: SaveSchedules, seconds: int) -> list[str]:
    """The kind of each checkpoint of so many seconds, a step each."""
    made = []
    for step in range(3, seconds):
        wants = table.wants(step, 100.0 + step)
        table.asked(100.0 + step, wants)
        assert not (wants.disk and wants.memory)
        made += ["disk"] * wants.disk + ["memory"] * wants.memory
    return made


def test_auto_saves_the_cheap_kind_more_often_than_the_dear_one() -> None:
    made = saved(learned(disk_s=4.0, memory_s=0.04), 3000)
    most, least = (3000 / optimum_s(4.0, PRIOR_MTBF_S + watched_s) for watched_s in (0.0, 3000.0))
    assert int(least) <= made.count("disk") <= most
    assert made.count("memory") > 8 * made.count("disk")


def test_auto_never_saves_the_kind_that_costs_more_and_survives_less() -> None:
    made = saved(learned(disk_s=0.04, memory_s=4.0), 3000)
    assert set(made) == {"disk"}


def test_failures_that_memory_answered_space_memory_alone() -> None:
    rewinds = Rewinds(count=1, recalled=30, failures=40, watched_s=0.0)
    assert rewinds.mtbf_s == PRIOR_MTBF_S / 2 and rewinds.either.mtbf_s == PRIOR_MTBF_S / 32
    told = learned(disk_s=1.0, memory_s=1.0)
    told.told(100.0, rewinds)
    calm = learned(disk_s=1.0, memory_s=1.0)
    calm.told(100.0, Rewinds(count=1, failures=40, watched_s=0.0))
    assert saved(told, 1000).count("memory") > 0 == saved(calm, 1000).count("memory")


def test_a_loss_brings_both_kinds_closer_together() -> None:
    rough = learned(disk_s=4.0, memory_s=0.04)
    for _ in range(50):
        rough.lost()
    calm = learned(disk_s=4.0, memory_s=0.04)
    often, seldom = saved(rough, 1000), saved(calm, 1000)
    assert often.count("disk") > 3 * seldom.count("disk")
    assert often.count("memory") > 3 * seldom.count("memory")
