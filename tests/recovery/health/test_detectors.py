"""Each detector: what it finds, whom it names, and what it leaves alone."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainchaos.recovery.detection.pace import HangLimits
from trainchaos.recovery.health.detector import Alarm, Detector, tail
from trainchaos.recovery.health.device_detectors import (
    EccDetector,
    IdleDetector,
    LinkDetector,
    ThermalDetector,
)
from trainchaos.recovery.health.job_detectors import (
    DigestDetector,
    HangDetector,
    StragglerDetector,
    ThroughputDetector,
    gradient_spike,
    loss_spike,
)
from trainchaos.recovery.health.readings import JOB, Place, Reading

STEP_S = 0.04
ALL: Sequence[Callable[[], Detector]] = (
    StragglerDetector,
    gradient_spike,
    loss_spike,
    ThroughputDetector,
    EccDetector,
    ThermalDetector,
    LinkDetector,
    IdleDetector,
    DigestDetector,
    HangDetector,
)
METRICS = {
    "straggler": "compute",
    "gradient-spike": "gradient_norm",
    "loss-spike": "loss",
    "throughput-drop": "throughput",
    "ecc-acceleration": "ecc_corrected_volatile",
    "thermal-limit": "temperature",
    "slow-link": "nvlink_bandwidth_out",
    "idle-device": "utilisation",
    "digest-mismatch": "digest",
    "hang": "committed",
}


def play(detector: Detector, readings: Iterable[Reading]) -> list[Alarm]:
    """All alarms, each reading told alone."""
    return [alarm for one in readings for alarm in detector.look([one], one.time_s)]


def of_ranks(
    metric: str, value: Callable[[int, int], float], count: int, every_s: float, ranks: int = 4
) -> Iterable[Reading]:
    """``value(rank, number)`` at each of ``count`` times."""
    for number in range(count):
        for rank in range(ranks):
            yield Reading(Place(rank), metric, value(rank, number), "", number * every_s, number)


def of_job(metric: str, values: Iterable[float], every_s: float = STEP_S) -> Iterable[Reading]:
    """One series."""
    for number, value in enumerate(values):
        yield Reading(JOB, metric, value, "", number * every_s, number)


def noise(seed: int, scale: float) -> Callable[[], float]:
    """Around 1."""
    draw = random.Random(seed)
    return lambda: 1.0 + scale * draw.uniform(-1.0, 1.0)


def test_a_rank_that_computes_for_longer_is_named_once() -> None:
    some = noise(1, 0.05)
    slow = of_ranks(
        "compute",
        lambda rank, n: some() * (1.4 if rank == 2 and 1000 <= n < 2000 else 1.0),
        3000,
        0.04,
    )
    (alarm,) = play(StragglerDetector(), slow)
    assert (alarm.what, alarm.where) == ("straggler", Place(2))
    assert 1000 * STEP_S <= alarm.since_s < 1025 * STEP_S
    assert alarm.value == pytest.approx(1.4, rel=0.05)
    assert alarm.value > alarm.threshold >= 1.1
    assert alarm.evidence["peers"] == 3


def test_a_straggler_that_comes_back_is_named_again() -> None:
    some = noise(1, 0.05)

    def took(rank: int, n: int) -> float:
        return some() * (1.4 if rank == 2 and n // 1000 % 2 else 1.0)

    slow = of_ranks("compute", took, 6000, STEP_S)
    assert [one.where for one in play(StragglerDetector(), slow)] == [Place(2)] * 3


def test_a_rank_that_was_never_faster_is_named_after_half_a_minute() -> None:
    some = noise(9, 0.05)
    slow = of_ranks("compute", lambda rank, n: some() * (1.5 if rank == 1 else 1.0), 1500, STEP_S)
    (alarm,) = play(StragglerDetector(), slow)
    assert (alarm.where, alarm.since_s) == (Place(1), 0.0)
    assert alarm.evidence["blocks"] == 32
    assert alarm.threshold == pytest.approx(1.25)
    little = of_ranks("compute", lambda rank, n: some() * (1.2 if rank == 1 else 1.0), 4000, STEP_S)
    assert play(StragglerDetector(), little) == []


@pytest.mark.parametrize("step_s", [0.04, 0.5, 7.0])
def test_steps_of_any_length_are_judged(step_s: float) -> None:
    some = noise(10, 0.05)

    def took(rank: int, n: int) -> float:
        return some() * (1.5 if rank == 1 and n >= 2000 else 1.0)

    assert len(play(StragglerDetector(), of_ranks("compute", took, 3000, step_s))) == 1
    drop = of_job("throughput", (some() * (0.7 if n >= 4000 else 1.0) for n in range(6000)), step_s)
    assert len(play(ThroughputDetector(), drop)) == 1


def test_all_ranks_slow_at_once_are_no_stragglers_and_two_ranks_name_none() -> None:
    some = noise(2, 0.05)
    both = of_ranks("compute", lambda rank, n: some() * (3.0 if n > 1000 else 1.0), 2000, 0.04)
    assert play(StragglerDetector(), both) == []
    two = of_ranks("compute", lambda rank, n: 1.0 + rank, 4000, 0.04, ranks=2)
    assert play(StragglerDetector(), two) == []


def test_a_rank_that_is_gone_is_not_in_a_row() -> None:
    some = noise(3, 0.05)
    readings = [
        one
        for one in of_ranks(
            "compute",
            lambda rank, n: some() * (1.5 if rank == 0 and n >= 1000 else 1.0),
            1200,
            0.04,
        )
        if one.where.rank or one.step is None or one.step < 1000 or one.step // 20 % 2
    ]
    assert play(StragglerDetector(), readings) == [], "it was there in every other block only"


@pytest.mark.parametrize("make", [gradient_spike, loss_spike])
def test_a_jump_is_found_and_a_slow_rise_is_not(make: Callable[[], Detector]) -> None:
    some = noise(4, 0.05)
    metric = METRICS[make().what]
    rise = of_job(metric, (some() * (1.0 + n / 1000) for n in range(5000)))
    assert play(make(), rise) == []
    jump = of_job(metric, (some() * (4.0 if 2000 <= n < 2020 else 1.0) for n in range(4000)))
    (alarm,) = play(make(), jump)
    assert alarm.since_s == pytest.approx(2000 * STEP_S)
    assert alarm.value > alarm.threshold > 1.05
    fall = of_job(metric, (some() * (0.1 if n >= 2000 else 1.0) for n in range(4000)))
    assert play(make(), fall) == []


@pytest.mark.parametrize("make", [gradient_spike, loss_spike])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_an_alarm_at_once(
    make: Callable[[], Detector], value: float
) -> None:
    detector = make()
    metric = METRICS[detector.what]
    values = [1.0] * 50 + [value] * 30 + [1.0] * 50 + [value]
    alarms = play(detector, of_job(metric, values))
    assert [one.since_s for one in alarms] == [50 * STEP_S, 130 * STEP_S]


def test_one_large_step_among_related_ones_is_no_row() -> None:
    """Its traces in the next steps are what it leads to expect."""
    draw, values, last = random.Random(5), [], 0.0
    for n in range(8000):
        last = 0.6 * last + draw.gauss(0.0, 0.1) + (4.0 if n % 1000 == 999 else 0.0)
        values.append(10.0 + last)
    assert play(gradient_spike(), of_job("gradient_norm", values)) == []


def test_a_lasting_drop_of_throughput_is_found_and_becomes_usual() -> None:
    some = noise(6, 0.05)
    drop = of_job("throughput", (1000 * some() * (0.8 if n >= 4000 else 1.0) for n in range(12000)))
    (alarm,) = play(ThroughputDetector(), drop)
    assert alarm.where == JOB
    assert alarm.value == pytest.approx(0.2, abs=0.03)
    assert 4000 * STEP_S <= alarm.since_s <= 4000 * STEP_S + 3.0
    short = of_job("throughput", (some() * (0.2 if n % 200 < 8 else 1.0) for n in range(9000)))
    assert play(ThroughputDetector(), short) == [], "pauses of 8 steps are in no median"


def test_memory_errors_that_become_frequent_are_found_and_bursts_are_not() -> None:
    def errors(times: Iterable[int], burst: int) -> Iterable[Reading]:
        at, count = set(times), 0
        for second in range(0, 30_000):
            count += burst * (second in at)
            yield Reading(
                Place(1, None, "cuda:1"), "ecc_corrected_volatile", float(count), "errors", second
            )

    assert play(EccDetector(), errors([5000, 20_000], 10_000)) == []
    (alarm,) = play(EccDetector(), errors([100, 9000, *range(20_000, 20_400, 20)], 1))
    assert (alarm.what, alarm.where.device) == ("ecc-acceleration", "cuda:1")
    assert alarm.since_s == 20_000
    assert alarm.value >= alarm.threshold >= 3
    assert play(EccDetector(), errors(range(0, 30_000, 50), 1)) == [], "it always had them"


def test_errors_that_were_not_corrected_are_an_alarm_at_once() -> None:
    where = Place(0, None, "cuda:0")

    def said(metric: str, *values: float) -> list[str]:
        readings = [Reading(where, metric, v, "", float(i)) for i, v in enumerate(values)]
        return [one.what for one in play(EccDetector(), readings)]

    assert said("ecc_uncorrected_volatile", 2, 2, 2) == [], "they were there before us"
    assert said("ecc_uncorrected_volatile", 0, 0, 1, 1, 3) == ["ecc-uncorrected"] * 2
    assert said("ecc_uncorrected_volatile", 5, 0, 1) == ["ecc-uncorrected"], "the driver began anew"
    assert said("row_remap_failed", 1, 1, 1) == ["ecc-uncorrected"]
    assert said("ecc_double_bit", 1, 1) == ["ecc-uncorrected"] * 2


def heat(degrees: Iterable[float], limit: float = 87.0) -> Iterable[Reading]:
    """Of one device, each second."""
    where = Place(0, None, "cuda:0")
    yield Reading(where, "temperature_slowdown", limit, "degC", 0.0)
    for second, value in enumerate(degrees):
        yield Reading(where, "temperature", float(round(value)), "degC", float(second))


def test_a_device_that_heats_up_is_found_before_it_slows_down() -> None:
    some = noise(7, 0.01)
    degrees = [72 * some() + max(0.0, 0.1 * (second - 300)) for second in range(600)]
    (alarm,) = play(ThermalDetector(), heat(degrees))
    reached = next(second for second, one in enumerate(degrees) if one >= 87.0)
    assert alarm.since_s < reached - 20
    cold = [75 - 40 * math.exp(-second / 60) for second in range(900)]
    assert play(ThermalDetector(), heat(cold)) == [], "it warmed up"
    assert play(ThermalDetector(), heat([85.0] * 60)) != []
    assert play(ThermalDetector(), list(heat([99.0] * 60))[1:]) == [], "its limit is not known"


def test_a_link_that_carries_less_than_its_peers_is_named() -> None:
    some = noise(8, 0.1)

    def carried(rank: int, second: int) -> float:
        load = 0.0 if second % 900 < 20 else 1e10 if second % 2400 < 1200 else 4e9
        return load * some() * (0.6 if rank == 3 and second >= 3000 else 1.0)

    (alarm,) = play(LinkDetector(), of_ranks("nvlink_bandwidth_out", carried, 4000, 1.0))
    assert alarm.where == Place(3)
    assert alarm.value == pytest.approx(0.4, abs=0.1)
    dead = of_ranks(
        "nvlink_bandwidth_out", lambda rank, s: 0.0 if rank == 1 and s > 2000 else some(), 3000, 1.0
    )
    assert [one.where for one in play(LinkDetector(), dead)] == [Place(1)]


def test_a_device_that_is_idle_alone_is_named_and_a_pause_of_all_is_none() -> None:
    alone = of_ranks("utilisation", lambda rank, s: 0.0 if rank == 1 and s > 99 else 90.0, 200, 1.0)
    detector = IdleDetector()
    (alarm,) = play(detector, alone)
    assert alarm.where == Place(1)
    assert (alarm.since_s, alarm.value) == (100.0, detector.row)
    assert 10 <= detector.row <= 16
    pause = of_ranks("utilisation", lambda rank, s: 0.0 if s > 99 else 90.0, 200, 1.0)
    assert play(IdleDetector(), pause) == []
    some = of_ranks("utilisation", lambda rank, s: 0.0 if rank == 1 and s % 8 else 90.0, 200, 1.0)
    assert play(IdleDetector(), some) == []


def digests(*steps: str) -> Iterable[Reading]:
    """A letter for each rank, "." for one that says nothing."""
    for number, letters in enumerate(steps):
        for rank, letter in enumerate(letters):
            if letter != ".":
                yield Reading(
                    Place(rank), "digest", 0.0, "", float(number), number, f"{number}{letter}"
                )


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        (["aaaa"] * 9, []),
        (["aaaa", "aaaa", "aaba", "aaba", "aaaa"], [2]),
        (["aaaa", "aaaa", "aabb", "aaaa"], [None]),
        (["abcd", "aaaa"], [None]),
        (["aaab", "aaaa", "aaaa"], [3]),
        (["aaaa", "aa.b", "aaaa", "aaaa"], [3]),
        (["aaaa", "aaa."] + ["aaa."] * 20 + ["aba."], [1]),
        (["a", "a", "b", "a"], []),
    ],
)
def test_who_differs_from_most_is_named(steps: list[str], named: list[int | None]) -> None:
    alarms = play(DigestDetector(), digests(*steps))
    assert [one.where.rank for one in alarms] == named
    assert all(one.value > one.threshold for one in alarms)


def test_shards_are_compared_with_their_like_only() -> None:
    detector = DigestDetector(shard_of=lambda rank: rank % 2)
    assert play(detector, digests(*["ababab"] * 5)) == []
    alarms = play(
        DigestDetector(shard_of=lambda rank: rank % 2),
        digests("ababab", "ababab", "ababac", "ababab"),
    )
    assert [one.where.rank for one in alarms] == [5]


def test_a_job_that_goes_back_is_compared_again() -> None:
    again = [*digests(*["aaa"] * 60), *digests(*["aaa"] * 8, "abb", "abb", "abb")]
    assert [one.where.rank for one in play(DigestDetector(), again)] == [0]


def test_ranks_that_are_behind_are_named_after_the_learned_deadline() -> None:
    detector = HangDetector()
    readings = [
        one
        for one in of_ranks("committed", lambda rank, n: float(n), 102, 0.1)
        if one.step is not None and (one.step < 100 or (one.where.rank != 2 and one.step == 100))
    ]
    assert play(detector, readings) == []
    at_s = 9.9 + 0.74
    assert detector.look([], at_s) == []
    (alarm,) = detector.look([], 9.9 + 0.9)
    assert alarm.where == Place(2)
    assert alarm.value == pytest.approx(0.9)
    assert alarm.threshold == pytest.approx(7.8 * 0.1 - 0.03)
    assert detector.look([], 99.0) == [], "once"


def test_a_job_without_any_commit_is_named_as_a_whole_and_one_that_goes_on_is_well() -> None:
    detector = HangDetector(limits=HangLimits(given_s=2.0))
    play(detector, of_ranks("committed", lambda rank, n: float(n), 50, 0.1))
    assert [one.where for one in detector.look([], 7.1)] == [JOB]
    late = [Reading(Place(rank), "committed", 50.0, "", 9.0, 50) for rank in range(4)]
    assert detector.look(late, 9.0) == []
    assert [one.where for one in detector.look([], 11.5)] == [JOB]


def test_the_share_of_a_decision_in_the_rate() -> None:
    assert tail(0.01, 3.6) == pytest.approx(1e-5)
    assert tail(1e9, 3600.0) == 0.5
    for rate, every_s in ((0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="more than 0"):
            tail(rate, every_s)


# ---- what no source should say: every detector takes it, raises nothing, and stays small

MAKES = pytest.mark.parametrize("make", ALL, ids=lambda make: make().what)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
MOST_BYTES = 4 << 20


def readings_of(
    what: str, value: float, time_s: float, rank: int | None, step: int
) -> list[Reading]:
    """A reading of the detector's metric, with a limit where it needs one."""
    where = Place(rank)
    found = [Reading(where, METRICS[what], value, "", time_s, step, f"{value:.0f}")]
    if what == "thermal-limit":
        found.insert(0, Reading(where, "temperature_slowdown", 87.0, "degC", time_s))
    return found


def sound(alarms: list[Alarm]) -> None:
    """Whether each can be shown to somebody."""
    for one in alarms:
        assert one.what
        assert not math.isnan(one.threshold)
        assert math.isfinite(one.since_s)
        str(one.where)


@pytest.mark.slow
@pytest.mark.sample(1)
@MAKES
@given(
    data=st.lists(
        st.tuples(NUMBERS, NUMBERS, st.one_of(st.none(), st.integers(0, 3)), st.integers(-5, 50)),
        max_size=60,
    )
)
def test_any_values_at_any_times(make: Callable[[], Detector], data: list[tuple]) -> None:
    detector = make()
    for value, time_s, rank, step in data:
        readings = readings_of(detector.what, value, time_s, rank, step)
        sound(list(detector.look(readings, time_s)))


@MAKES
def test_a_wild_value_among_many_does_no_harm(make: Callable[[], Detector]) -> None:
    """And things that are the same all the time are well, whatever came before."""
    detector = make()
    for wild in (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -1.0):
        sound(list(detector.look(readings_of(detector.what, wild, 1.0, 0, 1), 1.0)))
    if detector.what == "hang":
        return  # a job that commits nothing is what it looks for
    for second in range(100, 3000):
        for rank in range(4):
            said = detector.look(
                readings_of(detector.what, 50.0, float(second), rank, second), float(second)
            )
            assert not said or second < 1000


@MAKES
def test_a_clock_that_runs_backwards(make: Callable[[], Detector]) -> None:
    detector = make()
    for second in range(2000, -2000, -1):
        for rank in range(3):
            readings = readings_of(detector.what, 50.0, float(second), rank, 4000 - second)
            assert detector.look(readings, float(second)) == []


@pytest.mark.long
@MAKES
def test_places_without_end_are_not_all_remembered(make: Callable[[], Detector]) -> None:
    detector = make()
    tracemalloc.start()
    for rank in range(60_000):
        detector.look(readings_of(detector.what, 50.0, 0.0001 * rank, rank, rank // 1000), 0.0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8 * MOST_BYTES
