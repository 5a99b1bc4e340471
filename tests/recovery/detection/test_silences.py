"""Who is healthy though silent: stalls that all share, code between steps, ranks that say they are
busy, first steps, and processes that are kept from running; and that nobody else gains time by
that.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.support.fakes.marks import mark
from trainchaos.recovery.detection.hangs import Hang, HangDetector, LeaveWatch
from trainchaos.recovery.detection.pace import HangLimits
from trainchaos.recovery.process.starvation import (
    LOOK_S,
    Pulse,
    Starvation,
    ThreadReading,
    Usage,
    pressure_s,
    processor_s,
    threads_of,
)
from trainchaos.recovery.transport.progress_counters import Mark

TICK_S = 0.02


class Watched:
    """A detector that has seen a job make twenty steps, and a clock."""

    def __init__(
        self, step_s: float = 0.05, *, limits: HangLimits | None = None, ranks: int = 4
    ) -> None:
        self.now = 1000.0
        self.detector = HangDetector(limits=limits or HangLimits())
        self.detector.resumed(())
        for step in range(21):
            self.detector.observe(self.now + step * step_s, step)
            self.look(
                {f"w{n}": mark("optimizer", step=step + 1, moves=step) for n in range(ranks)},
                tick_s=0.0,
            )
        self.now += 21 * step_s

    def look(
        self,
        marks: Mapping[str, Mark],
        *,
        tick_s: float = TICK_S,
        state: str = "S",
        pulse: Callable[[str], Pulse] = lambda _: Pulse(),
        others_done: bool = False,
    ) -> Hang | None:
        self.now += tick_s
        return self.detector.look(
            self.now, marks, lambda _: state, pulse=pulse, others_done=others_done
        )

    def watch(
        self, marks: Mapping[str, Mark], *, for_s: float, state: str = "S", done: bool = False
    ) -> Hang | None:
        """The first hang found meanwhile, with fewer looks where there would be thousands."""
        tick_s = TICK_S if for_s < 100 else 4 * TICK_S
        for _ in range(round(for_s / tick_s) + 1):
            if hang := self.look(marks, tick_s=tick_s, state=state, others_done=done):
                return hang
        return None


def ranks(*phases: str, step: int = 10, moves: int = 0) -> dict[str, Mark]:
    return {f"w{n}": mark(phase, step=step, moves=moves) for n, phase in enumerate(phases)}


@pytest.mark.parametrize("stall_s", [2.5, 15.0, 1800.0])
def test_a_stall_that_all_ranks_share_is_nobodys_hang(stall_s: float) -> None:
    job = Watched()
    assert job.watch(ranks("data", "data", "data", "data"), for_s=stall_s) is None
    out = ranks("collective", "collective", "collective", "data")
    out["w3"] = mark("data")  # the last to come out of it has as long again
    assert job.watch(out, for_s=min(stall_s, 60.0) - 0.1) is None


def test_the_last_of_a_shared_stall_is_found_when_it_takes_as_long_again() -> None:
    job = Watched()
    assert job.watch(ranks("data", "data", "data", "data"), for_s=2.5) is None
    hang = job.watch(ranks("collective", "collective", "collective", "data"), for_s=2.7)
    assert (
        hang is not None and hang.process == "w3" and hang.silent_s == pytest.approx(2.5, abs=0.1)
    )


def test_a_data_source_that_is_slow_for_half_of_the_ranks_is_no_hang_of_theirs() -> None:
    """Whoever still had a batch waits for the others."""
    job = Watched()
    assert job.watch(ranks("collective", "data", "data", "data"), for_s=15) is None
    hang = Watched().watch(ranks("collective", "data", "data", "data"), for_s=602)
    assert hang is not None and hang.process == "", "but not for ever, and it has no culprit"
    assert hang.detail.startswith("no rank makes progress")


@pytest.mark.parametrize(
    "phases", [("data", "collective"), ("collective", "data", "collective", "collective")]
)
def test_one_rank_without_data_hangs_as_before(phases: tuple[str, ...]) -> None:
    hang = Watched(ranks=len(phases)).watch(ranks(*phases), for_s=0.66)
    assert hang is not None and phases[int(hang.process[1:])] == "data"


def test_a_rank_in_code_between_two_steps_may_evaluate_for_minutes_but_not_for_ever() -> None:
    marks = ranks("between", "collective", "collective", "collective")
    assert Watched().watch(marks, for_s=590, state="R") is None
    hang = Watched().watch(marks, for_s=602, state="R")
    assert hang is not None and hang.process == "w0"
    assert "code of the script's between steps" in hang.detail


def test_a_rank_that_says_it_is_busy_has_the_time_that_it_asked_for() -> None:
    waiting = ranks("collective", "collective", "collective", "collective")
    busy = waiting | {"w0": mark("data", busy_s=1200)}
    assert Watched().watch(busy, for_s=1190) is None
    hang = Watched().watch(busy, for_s=1202)
    assert hang is not None and hang.process == "w0" and "said that it is busy" in hang.detail
    found = Watched().watch(busy, for_s=0.2, state="T")
    assert found is not None and found.silent_s < 0.12, "a stop is certain, whatever it said"


def test_a_rank_that_is_busy_after_the_others_last_step_is_waited_for() -> None:
    assert Watched().watch({"w0": mark("between", busy_s=60)}, for_s=59, done=True) is None
    assert Watched().watch(ranks("optimizer", "optimizer"), for_s=0.7, done=True), (
        "those that are done wait"
    )


def test_what_the_user_says_counts_instead_of_what_was_learned() -> None:
    limits = HangLimits(given_s=30.0)
    marks = ranks("forward", "collective", "collective", "collective")
    assert Watched(limits=limits).watch(marks, for_s=29.5) is None
    hang = Watched(limits=limits).watch(marks, for_s=30.1)
    assert hang is not None and hang.process == "w0"
    stalled = Watched(limits=limits).watch(ranks("data", "data", "data", "data"), for_s=30.1)
    assert stalled is not None and stalled.process == "", "and for all ranks together"
    assert Watched(limits=limits).watch(ranks("data", "data", "data", "data"), for_s=29.5) is None


def test_a_bound_of_a_few_steps_does_not_end_the_first_step_of_a_job_or_of_a_replacement() -> None:
    """`--hang-timeout 0.15` ended every job at its start."""
    job = Watched.__new__(Watched)
    job.now, job.detector = 1000.0, HangDetector(limits=HangLimits(given_s=0.15))
    job.detector.resumed(())
    assert job.watch(ranks("forward", "collective", step=1), for_s=3) is None
    for step in range(1, 30):
        job.detector.observe(job.now, step - 1)
        assert job.look(ranks("optimizer", "optimizer", step=step, moves=step)) is None
        job.now += 0.05
    job.detector.resumed(["w0", "s9"])
    joins = {name: mark("joining", moves=98, step=29) for name in ("w0", "s9")}
    assert job.look(joins) is None
    late = {"w0": mark("collective", moves=99, step=29), "s9": mark("forward", moves=99, step=29)}
    assert job.watch(late, for_s=5) is None
    assert job.watch(late, for_s=2) is not None, "but it does not keep the others for ever"
    job.detector.resumed(["w0", "s9"])
    assert job.look(joins) is None
    late["w0"], late["s9"] = late["s9"], late["w0"]
    assert job.watch(late, for_s=0.2) is not None, "one that has trained keeps to the bound"


def test_a_replacement_compiles_as_long_as_the_first_processes_did() -> None:
    """Of its whole life the first step takes long, and those that wait for it have forgotten
    theirs.
    """
    job = Watched.__new__(Watched)
    job.now, job.detector = 1000.0, HangDetector()
    job.detector.resumed(())
    first = ranks("forward", "forward", step=1)
    assert job.watch(first, for_s=40) is None
    for step in range(1, 30):
        job.detector.observe(job.now, step - 1)
        assert job.look(ranks("optimizer", "optimizer", step=step, moves=step)) is None
        job.now += 0.05
    job.detector.resumed(["w0", "s9"])
    assert (
        job.look(
            {"w0": mark("joining", moves=98, step=29), "s9": mark("joining", moves=99, step=29)}
        )
        is None
    )
    compiling = {
        "w0": mark("collective", moves=99, step=29),
        "s9": mark("forward", moves=99, step=29),
    }
    assert job.watch(compiling, for_s=75) is None
    assert job.watch(compiling, for_s=8) is not None
    job.detector.resumed(["w0", "s9"])
    compiling["w0"], compiling["s9"] = compiling["s9"], compiling["w0"]
    assert job.watch(compiling, for_s=2) is not None, "one that has trained does not compile again"


def test_of_a_thousand_replacements_no_name_is_kept() -> None:
    job = Watched()
    for number in range(1000):
        members = ["w0", f"s{number}"]
        job.detector.resumed(members)
        for step in range(3):
            job.look({name: mark("optimizer", step=10 + step, moves=step) for name in members})
    assert len(pickle.dumps(job.detector)) < 2 * len(pickle.dumps(Watched().detector))


def test_data_that_often_come_late_are_waited_for() -> None:
    job = Watched()
    for late in range(3):
        marks = ranks("collective", "data", "collective", "collective", step=30 + late)
        assert job.watch(marks, for_s=0.5) is None
        assert job.look(ranks("data", "forward", "data", "data", step=30 + late, moves=1)) is None
    assert (
        job.watch(ranks("collective", "data", "collective", "collective", step=40), for_s=0.9)
        is None
    )
    assert (
        job.watch(ranks("collective", "data", "collective", "collective", step=40), for_s=0.2)
        is not None
    )


@pytest.mark.parametrize("step_s", [0.089, 0.131, 1.009])
def test_steps_are_measured_by_marks_and_not_by_looks(step_s: float) -> None:
    """A step ends between two looks; eight times that error is more than a hang may be late."""
    detector, now, step = HangDetector(), 1000.0, 0
    detector.resumed(())
    while step < 30:
        now += TICK_S
        step = int((now - 1000.0) / step_s)
        done_s = 1000.0 + step * step_s
        detector.observe(now, step, [done_s - step_s, done_s + 0.001])
        detector.look(
            now, {f"w{n}": mark("data", step=step + 1, moves=step) for n in range(2)}, lambda _: "S"
        )
    assert detector.deadline_s("forward") == pytest.approx(7.8 * step_s - 0.03, abs=1e-3)


def test_the_clock_of_another_machine_tells_nothing_of_a_step() -> None:
    detector = HangDetector()
    detector.resumed(())
    for step in range(20):
        now = 1000.0 + 0.1 * step
        detector.observe(now, step, [1e6 + 0.35 * step, 5.0])
        detector.look(now, {"w0": mark("data", step=step + 1, moves=step)}, lambda _: "S")
    assert detector.deadline_s("forward") == pytest.approx(7.8 * 0.1 - 0.03)


@pytest.mark.parametrize("step_s", [0.1, 1.0])
def test_one_that_is_in_the_others_way_gains_nothing_by_that(step_s: float) -> None:
    """It spins on a processor that they need, so that their part of the step takes half as long
    again.
    """
    job = Watched(step_s)
    began = job.now
    assert job.watch(ranks("forward", "forward", "forward", "forward"), for_s=1.5 * step_s) is None
    marks = ranks("forward", "collective", "collective", "collective", moves=1) | {
        "w0": mark("forward")
    }
    hang = job.watch(marks, for_s=8 * step_s)
    assert hang is not None and hang.process == "w0"
    assert 0.9 * 8 * step_s <= job.now - began <= 8 * step_s


# ---- starvation


def test_time_in_which_a_rank_is_kept_from_running_does_not_count() -> None:
    job, held = Watched(), 0.0
    marks = ranks("forward", "collective", "collective", "collective")
    for look in range(1500):  # half a minute, of which it runs a hundredth
        held += TICK_S * 0.99
        assert job.look(marks, pulse=lambda _, held=held: Pulse(held)) is None, f"look {look}"
    hang = None
    for _ in range(40):
        hang = hang or job.look(marks, pulse=lambda _: Pulse(held))
    assert hang is not None and hang.process == "w0"


def test_all_in_a_collective_that_are_kept_from_running_do_not_blame_the_network() -> None:
    job, held = Watched(), 0.0
    marks = ranks("collective", "collective", "collective", "collective")
    for _ in range(500):
        held += TICK_S
        assert job.look(marks, pulse=lambda _, held=held: Pulse(held)) is None


def test_nobody_is_asked_what_kept_it_before_it_is_late() -> None:
    asked: list[str] = []

    def pulse(name: str) -> Pulse:
        asked.append(name)
        return Pulse()

    job = Watched()
    for _ in range(7):  # 0.14 of 0.6 s
        job.look(ranks("forward", "collective", "collective", "collective"), pulse=pulse)
    assert asked == []
    for _ in range(7):
        job.look(ranks("forward", "collective", "collective", "collective"), pulse=pulse)
    assert set(asked) == {"w0"}, "and of those that wait nobody"


@pytest.mark.parametrize("late", [1, 3, 12])
def test_starvation_that_is_learned_of_late_is_credited_for_the_silence_it_was_in(
    late: int,
) -> None:
    """As of a wait that the kernel counts when it ends, or of a node whose word comes in beats."""
    job, known, held = Watched(), 0.0, 0.0
    marks = ranks("forward", "collective", "collective", "collective")
    for look in range(1500):
        held += TICK_S * 0.99
        known = held if look % late == 0 else known
        assert job.look(marks, pulse=lambda _, known=known: Pulse(known)) is None, f"look {look}"


def test_a_hang_after_long_starvation_is_found_as_soon_as_any() -> None:
    """Nothing that was credited is kept for later, and nothing of an earlier silence is credited to
    this one.
    """
    job, held = Watched(), 0.0
    marks = ranks("forward", "collective", "collective", "collective")
    for _ in range(500):
        held += TICK_S
        assert job.look(marks, pulse=lambda _, held=held: Pulse(held)) is None
    moved = marks | {"w0": mark("backward", moves=1)}
    looks = 0
    while job.look(moved, pulse=lambda _: Pulse(held)) is None:
        looks += 1
    assert looks * TICK_S == pytest.approx(0.6, abs=0.05)


def test_starvation_in_a_stall_that_all_share_excuses_nobody_afterwards() -> None:
    job, held = Watched(), 0.0
    lagging = ranks("forward", "collective", "collective", "collective")
    for _ in range(12):  # somebody has asked what keeps it
        assert job.look(lagging, pulse=lambda _: Pulse()) is None
    for _ in range(50):  # the others have lost their data, too: nobody waits
        held += TICK_S
        together = ranks("forward", "data", "data", "data")
        assert job.look(together, pulse=lambda _, held=held: Pulse(held)) is None
    lagging = {n: mark(m.phase, moves=9) if n != "w0" else m for n, m in lagging.items()}
    looks = 0
    while job.look(lagging, pulse=lambda _: Pulse(held)) is None:
        looks += 1
    assert looks * TICK_S <= 1.0 - 0.24 + 0.1, (
        "as long again as the stall, and what was counted before it"
    )


def thread(*, ran: float, queued: float = 0.0, ready: bool = True) -> ThreadReading:
    return ThreadReading(ready=ready, ran_s=ran, queued_s=queued)


def test_a_thread_that_spins_is_not_starved() -> None:
    starvation = Starvation()
    for look in range(100):
        starvation.look(look * LOOK_S, 7, {7: thread(ran=look * LOOK_S)})
    assert starvation.total_s == 0


def test_a_thread_that_sleeps_is_not_starved() -> None:
    starvation = Starvation()
    for look in range(100):
        starvation.look(look * LOOK_S, 7, {7: thread(ran=1.0, ready=False)})
    assert starvation.total_s == 0


def test_a_wait_in_the_queue_counts_at_once_and_only_once() -> None:
    """The kernel counts it when the thread runs again."""
    starvation = Starvation()
    for look in range(11):
        starvation.look(look * 0.1, 7, {7: thread(ran=1.0, queued=2.0)})
    assert starvation.total_s == pytest.approx(1.0)
    starvation.look(1.1, 7, {7: thread(ran=1.01, queued=3.09)})
    assert starvation.total_s == pytest.approx(1.09)
    starvation.look(1.2, 7, {7: thread(ran=1.11, queued=3.09)})
    assert starvation.total_s == pytest.approx(1.09)


def test_a_thread_beside_the_main_one_excuses_for_most_of_the_time_and_not_for_all() -> None:
    starvation = Starvation()
    for look in range(11):
        threads = {7: thread(ran=1.0, ready=False), 8: thread(ran=1.0, queued=look * 0.1)}
        starvation.look(look * 0.1, 7, threads)
    assert starvation.total_s == pytest.approx(0.75)


def kernel(slices: list[tuple[str, float]], look_s: float) -> Iterator[tuple[float, ThreadReading]]:
    """What looks at a thread show that (r)uns, (q)ueues and (s)leeps for so long at a time: a wait
    is counted when it ends. Times of looks, and readings.
    """
    now, ran, queued, next_s = 0.0, 0.0, 0.0, 0.0
    for what, length_s in slices:
        begun, now = now, now + length_s
        while next_s < now:
            into = next_s - begun if what == "r" else 0.0
            yield next_s, thread(ran=ran + into, queued=queued, ready=what != "s")
            next_s += look_s
        ran += length_s if what == "r" else 0.0
        queued += length_s if what == "q" else 0.0


@pytest.mark.parametrize("look_s", [0.03, 0.031, 0.07, 0.5])
@pytest.mark.parametrize("wait_s", [0.005, 0.04, 0.1, 1.7])
def test_of_many_waits_nothing_is_lost_and_nothing_counted_twice(
    wait_s: float, look_s: float
) -> None:
    slices = [("r", 0.003), ("q", wait_s), ("s", 0.001)] * round(8 / wait_s)
    starvation, last_s = Starvation(), 0.0
    for now, reading in kernel([*slices, ("r", 1.0)], look_s):
        starvation.look(now, 7, {7: reading})
        assert starvation.total_s <= now + 1e-9
        last_s = now
    assert last_s > 8 and starvation.total_s == pytest.approx(wait_s * round(8 / wait_s), abs=1e-6)


def test_a_rank_that_gets_a_few_milliseconds_now_and_then_is_not_hung() -> None:
    """Beside processes that take all they get. It moves when it has had its processor time."""
    job, starvation = Watched(), Starvation()
    marks = ranks("forward", "collective", "collective", "collective")
    for now, reading in kernel([("r", 0.003), ("q", 0.05)] * 113, TICK_S):

        def pulse(_: str, now: float = now, reading: ThreadReading = reading) -> Pulse:
            starvation.look(now, 7, {7: reading})
            return starvation.pulse()

        assert job.look(marks, pulse=pulse) is None, (
            f"after {now:.2f} s, of which it had a twentieth"
        )


def test_what_two_threads_waited_at_once_counts_once_whenever_it_is_learned() -> None:
    """The second one's wait is counted by the kernel when the first one's has been credited for
    long.
    """
    starvation = Starvation()
    for look in range(11):
        threads = {7: thread(ran=1.0, queued=look * 0.1), 8: thread(ran=1.0, ready=look == 0)}
        starvation.look(look * 0.1, 7, threads)
    assert starvation.total_s == pytest.approx(1.0)
    late = {7: thread(ran=1.1, queued=1.0), 8: thread(ran=1.0, queued=0.2)}
    starvation.look(1.1, 7, late)
    assert starvation.total_s == pytest.approx(1.075), (
        "only three quarters of a time in which the first one ran"
    )


def test_a_thread_that_just_woke_up_was_not_in_the_queue_all_the_time() -> None:
    starvation = Starvation()
    for look in range(40):
        awake = look % 2 == 1
        starvation.look(
            look * 0.1, 7, {7: thread(ran=look * 1e-5, queued=look // 2 * 1e-4, ready=awake)}
        )
        starvation.look(
            look * 0.1 + 1e-3, 7, {7: thread(ran=look * 1e-5, queued=look // 2 * 1e-4, ready=awake)}
        )
    assert starvation.total_s < 0.1


def test_where_threads_are_not_counted_the_pressure_of_the_machine_is() -> None:
    starvation = Starvation()
    for look in range(11):
        starvation.look(look * 0.1, 7, {}, pressure_s=5.0 + look * 0.1)
    assert starvation.total_s == pytest.approx(0.75)


def test_the_kernel_is_read() -> None:
    import os

    threads = threads_of(os.getpid())
    assert threads[os.getpid()].ran_s > 0 and threads[os.getpid()].ready
    assert threads_of(2**22 + 1) == {}
    assert pressure_s() >= 0
    assert processor_s()[os.getsid(0)] > 0


def test_all_processes_are_looked_at_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(
        "trainchaos.recovery.process.starvation.everybody", lambda: looks.append(1) or iter(())
    )
    usage, asked = Usage(), [Starvation() for _ in range(64)]
    for now in (10.0, 10.5, 11.0, 11.5):
        for starvation in asked:
            starvation.taken(now, 2**22 + 1, usage)
    assert len(looks) == 2
    assert not asked[0].pulse().working


def test_who_uses_half_a_core_works() -> None:
    starvation = Starvation()
    starvation.worked(10.0, 100.0)
    assert not starvation.pulse().working, "nothing is known yet"
    starvation.worked(11.0, 100.6)
    assert starvation.pulse().working
    starvation.worked(12.0, 100.7)
    assert not starvation.pulse().working


@pytest.mark.parametrize(("working", "limit_s"), [(False, 60), (True, 15 + 450)])
def test_in_the_first_step_a_process_that_computes_may_compile_for_minutes(
    working: bool, limit_s: float
) -> None:
    """A quarter of the minute passes before anybody asks what it does."""
    detector, now, hang = HangDetector(), 1000.0, None
    detector.resumed(())
    while hang is None:
        now += TICK_S
        marks = ranks("forward", "collective", step=1)
        hang = detector.look(now, marks, lambda _: "R", pulse=lambda _: Pulse(working=working))
    assert hang.process == "w0" and now - 1000.0 == pytest.approx(limit_s, abs=1)


# ---- leaving a generation that is aborted


def left(
    marks: Mapping[str, Mark], *, for_s: float, step_s: float = 0.05, starved_share: float = 0.0
) -> list[str]:
    leaving = LeaveWatch(pace=Watched(step_s).detector.pace, least_s=1.0)
    for look in range(round(for_s / TICK_S) + 1):
        now = look * TICK_S
        late = leaving.late(
            now, marks, lambda _: "S", lambda _, now=now: Pulse(now * starved_share)
        )
        if late:
            return list(late)
    return []


def test_the_time_to_leave_scales_with_the_step() -> None:
    assert left(ranks("forward", "collective"), for_s=0.95) == []
    assert left(ranks("forward", "collective"), for_s=1.1) == ["w0", "w1"]
    assert left(ranks("forward"), for_s=15.5, step_s=2.0) == [], "it notices when the pass ends"
    assert left(ranks("forward"), for_s=16.2, step_s=2.0) == ["w0"]
    assert left(ranks("forward", "collective"), for_s=1.1, step_s=2.0) == ["w1"], (
        "out of a collective it comes at once"
    )


MANY, FAR_S = 16_384, 0.4
"""Ranks of a job, and what lies between two looks at them on a slow processor."""


@pytest.mark.slow
def test_of_looks_that_lie_far_apart_at_many_ranks_all_time_counts() -> None:
    """It was a quarter of it, so that a hang was found in four times its limit."""
    marks = {f"w{rank}": mark("collective") for rank in range(MANY)}
    marks["w0"] = mark("forward", collective=0)
    detector = Watched().detector
    looks = math.ceil(detector.deadline_s("forward") / FAR_S) + 2  # the first one counts nothing
    found = [detector.look(1000.0 + look * FAR_S, marks, lambda _: "R") for look in range(looks)]
    assert found[0] is None and found[-1] is not None and found[-1].process == "w0"
    leaving = LeaveWatch(pace=Watched().detector.pace, least_s=1.0)
    late = [
        leaving.late(1000.0 + look * FAR_S, marks, lambda _: "R", lambda _: Pulse())
        for look in range(math.ceil(1.0 / FAR_S) + 2)
    ]
    assert "w0" in late[-1]


def test_whoever_is_busy_or_evaluates_leaves_when_it_is_done() -> None:
    assert left({"w0": mark("between", busy_s=90)}, for_s=89) == []
    assert left({"w0": mark("between", busy_s=90)}, for_s=91) == ["w0"]
    assert left(ranks("between"), for_s=599) == []


def test_whoever_is_kept_from_running_has_longer_to_leave() -> None:
    assert left(ranks("forward"), for_s=1.7, starved_share=0.6) == []
    assert left(ranks("forward"), for_s=3.5, starved_share=0.6) == ["w0"]


def test_whoever_moves_has_not_stopped_to_leave() -> None:
    leaving = LeaveWatch(pace=Watched().detector.pace, least_s=1.0)
    for look in range(200):
        marks = {"w0": mark("checkpoint")._replace(time_ns=look // 40)}
        assert leaving.late(look * TICK_S, marks, lambda _: "S", lambda _: Pulse()) == {}
