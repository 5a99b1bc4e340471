"""A small evaluation of the detectors of health: each holds the rate of false alarms that it states
and finds what cannot be missed; and none is wrong about real runs that are stored.
"""

from __future__ import annotations

import tarfile
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from benchmarks.health import __main__ as detectors
from benchmarks.health import stored, streams
from benchmarks.health.cases import CASES, Null, Planted, null, planted
from benchmarks.health.streams import WEATHERS, kept, student
from tests.support.portions import long_but
from trainchaos.chaos.events.log import read_log

STORED = Path(__file__).parents[1] / "harness" / "judge" / "stored"
HOURS = {
    "straggler": 8.0,
    "gradient-spike": 1.0,
    "loss-spike": 1.0,
    "throughput-drop": 1.0,
    "hang": 1.0,
    "ecc-acceleration": 400.0,
}
"""Of series; others: 40. Of each weather at least one run."""
PLAINLY = {
    "straggler": 2.0,
    "gradient-spike": -100.0,
    "loss-spike": 2.0,
    "throughput-drop": 0.4,
    "ecc-acceleration": 500.0,
    "thermal-limit": 0.5,
    "slow-link": 1.0,
    "idle-device": 1.0,
    "digest-mismatch": 1.0,
    "hang": 1.0,
}
"""Sizes that nobody should miss."""


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(list(CASES), "digest-mismatch", "hang"))
def test_the_stated_rate_of_false_alarms_holds(name: str) -> None:
    case = CASES[name]
    hours = HOURS.get(name, 40.0)
    case = replace(case, run_s=int(min(case.run_s, 3600 * hours / case.series / len(WEATHERS))))
    found = null(case, seed=7, hours=hours)
    assert found.hours >= 0.99 * hours
    assert found.surely_over <= case.make().rate, (found.alarms, found.names)


@pytest.mark.parametrize("name", CASES)
def test_what_is_plain_is_found_and_named(name: str) -> None:
    found = planted(CASES[name], seed=7, size=PLAINLY[name], n=3)
    assert (len(found.delays_s), found.wrong) == (3, 0)
    assert all(0.0 <= delay <= CASES[name].watched_s for delay in found.delays_s)


@pytest.mark.slow
def test_what_a_detector_does_not_count_as_wrong_is_left_alone() -> None:
    """A rank that is 5 % slower, and a loss of 3 % of the throughput, are within the floors."""
    for name, size in (("straggler", 1.05), ("throughput-drop", 0.03)):
        found = planted(CASES[name], seed=7, size=size, n=2)
        assert (len(found.delays_s), found.wrong) == (0, 0)


def test_a_rate_that_is_exceeded_is_said() -> None:
    many = Null(alarms=40, hours=100.0)
    assert 0.25 < many.surely_over < many.rate < many.upper < 0.55
    assert not detectors.within("straggler", many)
    assert detectors.within("straggler", Null(alarms=0, hours=1.0))
    assert not detectors.within("digest-mismatch", Null(alarms=1, hours=1e6))
    one = Planted(n=4, delays_s=[1.0, 3.0], wrong=1)
    text = detectors.table({"straggler": (many, {2.0: one})})
    assert "| straggler | 40 / 100 | 0.4 | 0.52 | 0.01 EXCEEDED |" in text
    assert "| straggler | 2 x | 4 | 50% | 2.0 | 3.0 | 67% |" in text


def test_the_same_seed_gives_the_same_series() -> None:
    for case in CASES.values():
        first, again, other = (
            [
                poll
                for poll, _ in zip(
                    case.stream(numpy.random.default_rng(seed), WEATHERS[2], 60, None),
                    range(30),
                    strict=False,
                )
            ]
            for seed in (1, 1, 2)
        )
        assert first == again
        assert first != other or case.stream in (streams.memory_errors,)


def test_the_noise_is_as_heavy_as_it_says() -> None:
    rng = numpy.random.default_rng(1)
    for related in (0.0, 0.5):
        values = student(rng, 200_000, related)
        assert numpy.mean(numpy.abs(values) > 10.0) > 1e-4, "normal noise never is"
        found = numpy.corrcoef(numpy.sign(values[1:]), numpy.sign(values[:-1]))[0, 1]
        assert (found > 0.2) == bool(related)
    assert 0.9 < kept(rng, 100_000, WEATHERS[2]).mean() < 0.99


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("archive", ["kill-one-rank", "nan-gradient"])
def test_real_runs_to_which_nothing_was_done_are_well(archive: str, tmp_path: Path) -> None:
    with tarfile.open(STORED / f"{archive}.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    arms = sorted({path.parent for path in tmp_path.rglob("w0.jsonl")})
    assert any(arm.name.endswith("control") for arm in arms)
    for arm in arms:
        found = stored.alarms_of(read_log(arm))
        if arm.name.endswith("control"):
            assert not any(found.values()), (arm.name, found)
        for alarm, _ in found["hang"]:
            assert alarm.value > alarm.threshold
