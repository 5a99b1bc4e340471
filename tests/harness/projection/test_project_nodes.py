"""Lemons, slow nodes and causes: the simulation against limits that formulas give."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from tests.harness.projection.test_simulate import TRIALS, job, played, same
from trainchaos.harness.projection import closed
from trainchaos.harness.projection.closed import binomial, expected
from trainchaos.harness.projection.laws import Duration, Mixture, Weibull
from trainchaos.harness.projection.simulate import Job, Lemons, Slow, simulate

MTBF_S, STALL_S = 180.0, 5.0
STALL = Duration(median_s=STALL_S)


def formula(one: Job) -> float:
    """Where there is one."""
    found, why = expected(one)
    assert found is not None and not why
    return found


@pytest.mark.parametrize("lemons", [Lemons(share=0.0, times=50.0), Lemons(share=0.3, times=1.0)])
def test_no_lemons_or_lemons_like_the_rest_are_a_plain_job(lemons: Lemons) -> None:
    one = job(Weibull(MTBF_S), stall=STALL, lemons=lemons)
    plain = closed.goodput(30.0, 1.0, 0.0, STALL_S, MTBF_S)
    assert formula(one) == pytest.approx(plain, rel=1e-9)
    assert same(played(one), plain)


@pytest.mark.parametrize("rollback", [True, False])
def test_a_mixture_fails_at_the_mean_of_its_rates(rollback: bool) -> None:
    lemons = Lemons(share=0.05, times=10.0)
    more = {"nodes": 1000, "rollback": rollback, "stall": STALL}
    if not rollback:
        more |= {"spares": 2, "repair": Duration(median_s=200.0)}
    one = job(Weibull(MTBF_S), lemons=lemons, **more)
    outcome = played(one, failures=500)
    assert same(outcome, formula(one))
    running_s = outcome.horizon_s - outcome.lost_s["stall"].mean()
    assert outcome.failures.mean() == pytest.approx(running_s / MTBF_S * 1.45, rel=0.02)
    assert outcome.quarantined.max() == 0


@pytest.mark.parametrize("after", [1, 3])
def test_lemons_leave_after_so_many_failures(after: int) -> None:
    """Without stalls each lemon fails as a Poisson process of its own rate, and is gone at the
    m-th: by time T with probability P(Weibull(k r T) >= m).
    """
    lemons = Lemons(share=0.5, times=8.0, quarantine=after)
    one = job(Weibull(MTBF_S), nodes=100, lemons=lemons)
    outcome = played(one, failures=40)
    mean = 8.0 / 100 * 40
    still = math.exp(-mean) * sum(mean**k / math.factorial(k) for k in range(after))
    gone = outcome.quarantined
    error = gone.std(ddof=1) / math.sqrt(len(gone))
    assert abs(gone.mean() - 50 * (1 - still)) < 4.5 * error
    assert expected(one)[0] is None and "quarantine" in expected(one)[1]


def slow(found_s: float | None, *, mean_s: float = 300.0, factor: float = 1.5) -> Slow:
    """A slow node each five minutes."""
    return Slow(mean_s=mean_s, factor=factor, found_s=found_s)


@pytest.mark.parametrize("found_s", [0.0, 60.0, 600.0])
@pytest.mark.parametrize("rollback", [True, False])
def test_slow_nodes_slow_the_job_until_they_are_found(found_s: float, rollback: bool) -> None:
    more: dict[str, Any] = {"stall": STALL, "slow": slow(found_s), "rollback": rollback}
    outcome = played(job(Weibull(1800.0), segment_s=300.0, **more), failures=100)
    one = job(Weibull(1800.0), segment_s=300.0, **more)
    assert same(outcome, formula(one))


def test_slow_nodes_are_swapped_so_long_after_the_first_of_them() -> None:
    """Others that become slow meanwhile do not put it off: by a plain loop, with a node each 300 s
    and 1,800 s until they are found, 6/7 of the time is slow.
    """
    chance = random.Random(4)
    slow_s = now_s = 0.0
    swaps = 0
    while now_s < 2e6:
        now_s += chance.expovariate(1 / 300.0) + 1800.0
        slow_s, swaps = slow_s + 1800.0, swaps + 1
    nothing = Duration(median_s=0.0)
    one = job(Weibull(1e9), stall=nothing, slow=slow(1800.0, factor=2.0), save_s=0.0)
    outcome = simulate(one, 2e5, 200, np.random.default_rng(1))
    assert outcome.goodput.mean() == pytest.approx(1 - slow_s / now_s / 2, abs=0.005)
    assert outcome.swaps.mean() / 2e5 == pytest.approx(swaps / now_s, rel=0.02)
    assert formula(one) == pytest.approx(1 - 6 / 7 / 2)


def test_never_found_is_the_slowed_share_from_the_first_on() -> None:
    """The first comes after an exponential time: full speed for (1 - e^-x) / x, x = T / mean."""
    one = job(Weibull(1e9), slow=slow(None, mean_s=1000.0, factor=2.0), save_s=0.0)
    outcome = simulate(one, 2000.0, 4000, np.random.default_rng(1))
    full = (1 - math.exp(-2.0)) / 2.0
    assert same(outcome, full + (1 - full) / 2.0)
    assert expected(one)[0] is None and "never found" in expected(one)[1]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"lemons": Lemons(share=0.1, times=2.0)}, "lemons have a formula only"),
        ({"slow": slow(1.0)}, "slow nodes have a formula only"),
    ],
)
def test_without_a_constant_rate_there_is_no_formula(more: dict[str, Any], why: str) -> None:
    assert why in expected(job(Weibull(MTBF_S, 0.7), **more))[1]


def test_causes_that_take_their_own_time_cost_their_mean() -> None:
    stall = Mixture([(0.6, Duration(median_s=10.0, sigma=0.5)), (0.4, Duration(median_s=1.0))])
    outcome = played(job(Weibull(MTBF_S), stall=stall))
    mean_s = 0.6 * 10.0 * math.exp(0.125) + 0.4
    assert stall.mean_s == pytest.approx(mean_s)
    assert same(outcome, closed.goodput(30.0, 1.0, 0.0, mean_s, MTBF_S))
    drawn = stall.sample(np.random.default_rng(1), 100_001)
    assert stall.median_s == pytest.approx(float(np.median(drawn)), rel=0.02)


@pytest.mark.slow
def test_a_node_that_is_in_repair_during_its_own_stall_slows_nobody_down_meanwhile() -> None:
    """Where a stall is a twentieth of a repair that shows; no node is missing for less."""
    more: dict[str, Any] = {"rollback": False, "spares": 0, "nodes": 20}
    repair = Duration(median_s=400.0)
    one = job(Weibull(300.0), stall=Duration(median_s=20.0), repair=repair, **more)
    outcome = played(one, failures=2000)
    assert same(outcome, formula(one))
    error = outcome.goodput.std(ddof=1) / math.sqrt(TRIALS)
    assert formula(one) * (20 / 320 / 20) > 4.5 * error, "the whole repair would be told from it"
    short = job(Weibull(300.0), stall=Duration(median_s=500.0), repair=repair, **more)
    assert same(played(short), formula(short)) and played(short).lost_s["reduced"].max() == 0


def test_binomial_numbers_are_all_that_matter() -> None:
    found = dict(binomial(20, 0.3))
    assert found[6] == pytest.approx(math.comb(20, 6) * 0.3**6 * 0.7**14)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert binomial(10, 0.0) == [(0, 1.0)] and binomial(10, 1.0) == [(10, 1.0)]
    many = binomial(16_384, 0.05)
    assert math.fsum(p for _, p in many) == pytest.approx(1.0, abs=1e-9) and len(many) < 1000
