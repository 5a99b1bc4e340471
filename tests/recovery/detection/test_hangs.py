"""Hang detection from progress marks and a clock alone.

Hung told from waiting, starving and checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.marks import mark
from trainchaos.recovery.detection.hangs import Hang, HangDetector, HangLimits
from trainchaos.recovery.detection.silence import MAX_LOOK_S
from trainchaos.recovery.transport.progress_counters import Mark

LIMITS = HangLimits(
    floor_s=0.6,
    ahead_s=0.0,
    ahead_steps=0.0,
    factor=8.0,
    ceiling_s=600.0,
    checkpoint_floor_s=5.0,
    first_step_s=60.0,
)
TICK_S = 0.02


def trained(step_s: float = 0.05, steps: int = 20) -> HangDetector:
    """A detector that has watched so many steps of that length."""
    detector = HangDetector(limits=LIMITS)
    detector.resumed(())
    for step in range(steps + 1):
        detector.observe(step * step_s, step)
    return detector


def watch(
    detector: HangDetector,
    marks: Mapping[str, Mark],
    *,
    for_s: float,
    states: Mapping[str, str] | None = None,
) -> Hang | None:
    """Look again and again at ranks that do not move; the first hang found."""
    states = states or {}
    start = detector._last_look_s or 1000.0
    for look in range(round(for_s / TICK_S) + 1):
        hang = detector.look(start + look * TICK_S, marks, lambda name: states.get(name, "S"))
        if hang is not None:
            return hang
    return None


def hung(
    marks: Mapping[str, Mark], *, for_s: float, states: Mapping[str, str] | None = None
) -> str | None:
    """Who is found to hang in a trained job; None: nobody."""
    hang = watch(trained(), marks, for_s=for_s, states=states)
    return None if hang is None else hang.process


def test_whoever_has_not_entered_the_collective_is_the_one_that_hangs() -> None:
    marks = {
        "w0": mark("collective", collective=2),
        "w1": mark("backward", collective=1),
        "w2": mark("collective", collective=2),
    }
    assert hung(marks, for_s=0.58) is None
    assert hung(marks, for_s=0.66) == "w1"


def test_a_rank_in_an_earlier_collective_is_not_to_blame_for_the_bytes_it_waits_for() -> None:
    """As in a partition that begins while the last bytes are on their way; the group is broken and
    formed again.
    """
    marks = {"w0": mark("collective", collective=3), "w1": mark("collective", step=9, collective=2)}
    hang = watch(trained(), marks, for_s=1)
    assert hang is not None and hang.process == ""
    assert hang.detail.startswith("a rank waits for bytes that others have, silent for")


def test_a_rank_that_left_out_a_collective_of_its_step_is_to_blame_though_it_waits_in_one() -> None:
    """A rank enters all collectives of a step before it waits for any."""
    marks = {"w0": mark("collective", collective=3), "w1": mark("collective", collective=2)}
    hang = watch(trained(), marks, for_s=1)
    assert hang is not None and hang.process == "w1"
    assert "without entering collective 3, in which the others wait" in hang.detail


@pytest.mark.parametrize("phase", ["forward", "collective", "checkpoint"])
@pytest.mark.parametrize("step_s", [0.01, 0.05, 10.0])
def test_a_stopped_rank_is_certain_and_found_however_long_steps_take(
    phase: str, step_s: float
) -> None:
    marks = {"w0": mark("collective", collective=2), "w1": mark(phase, collective=1)}
    assert watch(trained(step_s), marks, for_s=0.08, states={"w1": "T"}) is None
    found = watch(trained(step_s), marks, for_s=0.14, states={"w1": "T"})
    assert found is not None and found.process == "w1"
    assert watch(trained(step_s), marks, for_s=0.5, states={"w1": "S"}) is None, (
        "what sleeps may still wake up"
    )


@pytest.mark.parametrize("phase", ["forward", "collective"])
def test_a_rank_held_by_a_debugger_has_as_long_as_any_other(phase: str) -> None:
    """Whoever looks at the stack of a slow rank does not want it replaced."""
    marks = {"w0": mark("collective", collective=2), "w1": mark(phase, collective=1)}
    assert hung(marks, for_s=0.58, states={"w1": "t"}) is None
    assert hung(marks, for_s=0.66, states={"w1": "t"}) == "w1"
    assert watch(trained(step_s=10.0), marks, for_s=60, states={"w1": "t"}) is None
    together = {name: mark("collective") for name in ("w0", "w1", "w2")}
    assert hung(together, for_s=0.66, states={"w1": "t"}) == "w1", (
        "it would not notice the end of its wait"
    )


def test_a_rank_stopped_in_its_first_step_is_found() -> None:
    detector = HangDetector(limits=LIMITS)
    detector.resumed(())
    assert watch(
        detector, {"w0": mark("forward"), "w1": mark("forward")}, for_s=0.14, states={"w1": "T"}
    )


def test_short_stops_in_a_long_step_do_not_add_up() -> None:
    marks = {"w0": mark("collective", collective=2), "w1": mark("forward", collective=1)}
    detector = trained(step_s=10.0)
    for _ in range(20):
        assert watch(detector, marks, for_s=0.06, states={"w1": "T"}) is None
        assert watch(detector, marks, for_s=0.02, states={"w1": "R"}) is None


def test_what_passes_between_two_looks_is_a_stop_only_if_both_saw_it() -> None:
    marks = {"w0": mark("collective", collective=2), "w1": mark("forward", collective=1)}
    detector = trained()
    detector.look(1000.0, marks, lambda _: "S")
    assert detector.look(1000.02, marks, lambda _: "S") is None
    assert detector.look(1000.12, marks, lambda _: "T") is None


def test_a_stopped_rank_in_an_earlier_collective_is_to_blame() -> None:
    marks = {"w0": mark("collective", collective=3), "w1": mark("collective", collective=2)}
    assert hung(marks, for_s=1, states={"w1": "T"}) == "w1"


def test_one_that_waits_for_bytes_does_not_hide_one_that_hangs() -> None:
    marks = {
        "w0": mark("collective", step=9, collective=1),
        "w1": mark("collective", collective=3),
        "w2": mark("backward"),
    }
    assert hung(marks, for_s=1) == "w2"


def test_a_rank_one_step_behind_is_found_by_its_step() -> None:
    marks = {
        "w0": mark("collective", step=11, collective=1),
        "w1": mark("optimizer", step=10, collective=9),
    }
    assert hung(marks, for_s=1) == "w1"


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "joining", "idle"])
def test_silence_in_any_phase_is_a_hang(phase: str) -> None:
    assert hung({"w0": mark("collective"), "w1": mark(phase, collective=0)}, for_s=0.66) == "w1"


def test_the_only_rank_of_a_world_hangs_in_its_collective_too() -> None:
    assert hung({"w0": mark("collective")}, for_s=0.66) == "w0"


def test_all_in_one_collective_is_nobodys_hang_but_the_networks() -> None:
    marks = {name: mark("collective") for name in ("w0", "w1", "w2")}
    assert hung(marks, for_s=1.18) is None
    hang = watch(trained(), marks, for_s=1.3)
    assert hang is not None
    assert hang.process == ""
    assert hang.detail.startswith("all ranks wait in one collective, silent for 1.2")


def test_one_stopped_by_a_signal_in_a_collective_that_all_have_entered_is_named() -> None:
    marks = {name: mark("collective") for name in ("w0", "w1", "w2")}
    assert hung(marks, for_s=0.08, states={"w1": "T"}) is None
    assert hung(marks, for_s=0.14, states={"w1": "T"}) == "w1"


def test_a_hung_rank_keeps_the_network_from_being_blamed() -> None:
    marks = {"w0": mark("collective"), "w1": mark("backward")}
    assert hung(marks, for_s=60) == "w1"


def test_saving_a_checkpoint_may_take_longer() -> None:
    marks = {"w0": mark("checkpoint"), "w1": mark("collective", step=11)}
    assert hung(marks, for_s=4.9) is None
    assert hung(marks, for_s=5.1) == "w0"


def test_a_process_that_waits_for_a_device_gets_ten_times_as_long() -> None:
    marks = {"w0": mark("forward"), "w1": mark("collective")}
    assert hung(marks, for_s=5.9, states={"w0": "D"}) is None
    assert hung(marks, for_s=6.1, states={"w0": "D"}) == "w0"


@pytest.mark.parametrize("step_s", [0.05, 1.0])
def test_a_process_that_runs_and_gets_nowhere_has_no_longer_than_one_that_sleeps(
    step_s: float,
) -> None:
    """Whoever waits for a GPU spins; so does an endless loop. The kernel's letter tells neither
    from work.
    """
    marks = {"w0": mark("forward"), "w1": mark("collective")}
    limit = max(0.6, 8 * step_s)
    assert watch(trained(step_s), marks, for_s=limit - 0.02, states={"w0": "R"}) is None
    hang = watch(trained(step_s), marks, for_s=limit + 0.06, states={"w0": "R"})
    assert hang is not None and hang.process == "w0"


def test_the_worst_hang_is_the_one_reported() -> None:
    detector = trained()
    first = {"w0": mark("forward", moves=1), "w1": mark("collective"), "w2": mark("backward")}
    assert watch(detector, first, for_s=0.5) is None
    hang = watch(detector, first | {"w0": mark("forward", moves=2)}, for_s=1.0)
    assert hang is not None
    assert hang.process == "w2"
    assert hang.deadline_s == pytest.approx(0.6)


def test_nobody_to_watch_is_no_hang() -> None:
    assert hung({}, for_s=1) is None


def test_silence_counts_from_falling_behind_not_from_the_last_mark() -> None:
    detector = trained()
    waiting = {"w0": mark("forward"), "w1": mark("collective"), "w2": mark("collective")}
    assert watch(detector, waiting, for_s=0.5) is None
    ahead = {
        "w0": mark("collective", moves=1, step=11),
        "w1": mark("collective"),
        "w2": mark("collective"),
    }
    assert watch(detector, ahead, for_s=0.5) is None, (
        "w1 and w2 waited, and the collective has just ended"
    )
    hang = watch(detector, ahead, for_s=0.2)
    assert hang is not None
    assert hang.process == ""


def test_a_supervisor_without_cpu_accuses_nobody() -> None:
    detector = trained()
    marks = {"w0": mark("collective"), "w1": mark("forward", collective=0)}
    assert detector.look(1000.0, marks, lambda _: "S") is None
    assert detector.look(1030.0, marks, lambda _: "S") is None, "it did not look for 30 s"
    assert 5 * MAX_LOOK_S < 30.0


@given(step_s=st.floats(0.001, 60.0))
def test_the_deadline_follows_the_jobs_own_steps(step_s: float) -> None:
    assert trained(step_s).deadline_s("forward") == pytest.approx(max(0.6, 8 * step_s), rel=0.01)


def test_the_deadline_has_a_ceiling() -> None:
    assert trained(step_s=500.0).deadline_s("forward") == 600.0


def test_before_the_first_step_there_is_time_to_warm_up() -> None:
    marks = {"w0": mark("forward", step=1, committed=0), "w1": mark("collective", step=1)}
    detector = HangDetector(limits=LIMITS)
    detector.resumed(())
    assert watch(detector, marks, for_s=59) is None
    detector.resumed(())
    hang = watch(detector, marks, for_s=61)
    assert hang is not None
    assert hang.process == "w0"


def test_silence_before_a_generation_does_not_count() -> None:
    detector = trained()
    marks = {"w0": mark("joining"), "w1": mark("joining")}
    assert watch(detector, marks, for_s=0.5) is None
    detector.resumed(())
    assert watch(detector, marks, for_s=0.5) is None


def test_the_pause_of_a_recovery_is_not_learned_as_a_step() -> None:
    detector = trained(step_s=0.05)
    detector.resumed(())
    detector.observe(100.0, 20)
    detector.observe(100.05, 21)
    assert detector.deadline_s("forward") == pytest.approx(0.6)


def test_a_rollback_is_not_learned_as_a_step() -> None:
    detector = trained(step_s=1.0)
    detector.resumed(())
    detector.observe(120.0, 5)
    detector.observe(121.0, 6)
    assert detector.deadline_s("forward") == pytest.approx(8.0)


def test_a_few_slow_steps_do_not_spoil_the_deadline() -> None:
    detector = trained(step_s=0.1, steps=20)
    for number in range(5):
        detector.observe(2.0 + 30.0 * (number + 1), 21 + number)
    assert detector.deadline_s("forward") == pytest.approx(0.8, rel=0.01)


@pytest.mark.slow
@given(
    gap_s=st.floats(0.02, 0.5),
    phase=st.sampled_from(["data", "forward", "backward", "optimizer", "checkpoint", "joining"]),
    moves=st.integers(1, 20),
)
def test_a_slow_rank_that_moves_is_never_taken_for_hung(
    gap_s: float, phase: str, moves: int
) -> None:
    detector = trained(step_s=0.05)
    for move in range(moves):
        marks = {"w0": mark("collective"), "w1": mark(phase, moves=move, collective=0)}
        assert watch(detector, marks, for_s=gap_s) is None


@pytest.mark.slow
@given(
    phases=st.lists(
        st.sampled_from(["data", "forward", "backward", "collective", "optimizer", "idle"]),
        min_size=2,
        max_size=6,
    ),
    numbers=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)
def test_whoever_waits_in_the_furthest_collective_is_never_accused(
    phases: list[str], numbers: list[int]
) -> None:
    marks = {f"w{i}": mark(phase, collective=numbers[i]) for i, phase in enumerate(phases)}
    hang = watch(trained(), marks, for_s=2.0)
    if "collective" not in phases:
        assert hang is None, "nobody waits"
        return
    if hang is None:
        assert phases.count("data") >= max(2, len(phases) / 2), (
            "only a stall that is shared is nobody's"
        )
        return
    if hang.process:
        accused = marks[hang.process]
        furthest = max(m.collective for m in marks.values())
        assert accused.phase != "collective" or accused.collective < furthest


def test_who_waits_for_the_own_replica_is_not_late_for_the_others() -> None:
    """w1 hangs; w0 waits for its shard, and the other replica, collectives further, for both."""
    marks = {
        "w0": mark("collective", collective=3),
        "w1": mark("forward", collective=2),
        "w2": mark("collective", collective=5),
        "w3": mark("collective", collective=5),
    }
    replicas = {"w0": 0, "w1": 0, "w2": 1, "w3": 1}
    detector = trained()
    found = None
    for look in range(50):
        found = found or detector.look(1000.0 + look * TICK_S, marks, lambda _: "S", replicas)
    assert found is not None and found.process == "w1"
    assert (
        watch(trained(), {**marks, "w1": mark("collective", collective=3)}, for_s=1.0) is not None
    )
    silent = {**marks, "w1": mark("collective", collective=3)}
    detector = trained()
    looks = [detector.look(1000.0 + n * TICK_S, silent, lambda _: "S", replicas) for n in range(40)]
    assert not any(looks), "all wait: that is nobody's fault before the network's deadline"
