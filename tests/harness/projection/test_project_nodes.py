"""Lemons, slow nodes and causes: the simulation against limits that formulas give."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import numpy as np
import pytest

from tests.harness.projection.test_simulate import TRIALS, job, played, same
from trainchaos.harness.projection import closed
from trainchaos.harness.projection.arrivals import Poisson, Weibull
from trainchaos.harness.projection.durations import Duration, Mixture
from trainchaos.harness.projection.expected import binomial, expected
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
    one = job(Poisson(MTBF_S), stall=STALL, lemons=lemons)
    plain = closed.goodput(30.0, 1.0, 0.0, STALL_S, MTBF_S)
    assert formula(one) == pytest.approx(plain, rel=1e-9)
    assert same(played(one), plain)


def test_where_all_are_lemons_the_rate_is_theirs() -> None:
    one = job(Poisson(MTBF_S), stall=STALL, lemons=Lemons(share=1.0, times=4.0))
    assert formula(one) == pytest.approx(closed.goodput(30.0, 1.0, 0.0, STALL_S, MTBF_S / 4))
    assert same(played(one, failures=300), formula(one))


@pytest.mark.parametrize("rollback", [True, False])
def test_a_mixture_fails_at_the_mean_of_its_rates(rollback: bool) -> None:
    lemons = Lemons(share=0.05, times=10.0)
    more = {"nodes": 1000, "rollback": rollback, "shrinks": not rollback, "stall": STALL}
    if not rollback:
        more |= {"spares": 2, "repair": Duration(median_s=200.0)}
    one = job(Poisson(MTBF_S), lemons=lemons, **more)
    outcome = played(one, failures=500)
    assert same(outcome, formula(one))
    running_s = outcome.horizon_s - outcome.lost_s["stall"].mean()
    assert outcome.failures.mean() == pytest.approx(running_s / MTBF_S * 1.45, rel=0.02)
    assert outcome.quarantined.max() == 0


@pytest.mark.parametrize("after", [1, 3])
def test_lemons_leave_after_so_many_failures(after: int) -> None:
    """Without stalls each lemon fails as a Poisson process of its own rate, and is gone at the
    m-th: by time T with probability P(Poisson(k r T) >= m).
    """
    lemons = Lemons(share=0.5, times=8.0, quarantine=after)
    one = job(Poisson(MTBF_S), nodes=100, lemons=lemons)
    outcome = played(one, failures=40)
    mean = 8.0 / 100 * 40
    still = math.exp(-mean) * sum(mean**k / math.factorial(k) for k in range(after))
    gone = outcome.quarantined
    error = gone.std(ddof=1) / math.sqrt(len(gone))
    assert abs(gone.mean() - 50 * (1 - still)) < 4.5 * error
    assert expected(one)[0] is None and "quarantine" in expected(one)[1]


def test_a_quarantine_helps() -> None:
    shares = [
        played(job(Poisson(MTBF_S), nodes=100, stall=STALL, lemons=Lemons(**lemons)), 200)
        for lemons in ({"share": 0.2, "times": 20, "quarantine": q} for q in (1, 4, None))
    ]
    first, later, never = (one.goodput.mean() for one in shares)
    assert first > later > never + 0.05


def slow(found_s: float | None, *, mean_s: float = 300.0, factor: float = 1.5) -> Slow:
    """A slow node each five minutes."""
    return Slow(mean_s=mean_s, factor=factor, found_s=found_s)


@pytest.mark.parametrize("found_s", [0.0, 60.0, 600.0])
@pytest.mark.parametrize("rollback", [True, False])
def test_slow_nodes_slow_the_job_until_they_are_found(found_s: float, rollback: bool) -> None:
    more: dict[str, Any] = {"stall": STALL, "slow": slow(found_s), "rollback": rollback}
    outcome = played(job(Poisson(1800.0), segment_s=300.0, **more), failures=100)
    one = job(Poisson(1800.0), segment_s=300.0, **more)
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
    one = job(Poisson(1e9), stall=nothing, slow=slow(1800.0, factor=2.0), save_s=0.0)
    outcome = simulate(one, 2e5, 200, np.random.default_rng(1))
    assert outcome.goodput.mean() == pytest.approx(1 - slow_s / now_s / 2, abs=0.005)
    assert outcome.swaps.mean() / 2e5 == pytest.approx(swaps / now_s, rel=0.02)
    assert formula(one) == pytest.approx(1 - 6 / 7 / 2)


def test_found_at_once_is_a_swap_without_loss() -> None:
    nothing = Duration(median_s=0.0)
    one = job(Poisson(1e9), stall=nothing, slow=slow(0.0), save_s=0.0)
    outcome = simulate(one, 1e5, 50, np.random.default_rng(1))
    assert outcome.goodput == pytest.approx(np.ones(50))
    assert outcome.swaps.mean() == pytest.approx(1e5 / 300.0, rel=0.05)


def test_never_found_is_the_slowed_share_from_the_first_on() -> None:
    """The first comes after an exponential time: full speed for (1 - e^-x) / x, x = T / mean."""
    one = job(Poisson(1e9), slow=slow(None, mean_s=1000.0, factor=2.0), save_s=0.0)
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
    outcome = played(job(Poisson(MTBF_S), stall=stall))
    mean_s = 0.6 * 10.0 * math.exp(0.125) + 0.4
    assert stall.mean_s == pytest.approx(mean_s)
    assert same(outcome, closed.goodput(30.0, 1.0, 0.0, mean_s, MTBF_S))
    drawn = stall.sample(np.random.default_rng(1), 100_001)
    assert stall.median_s == pytest.approx(float(np.median(drawn)), rel=0.02)
    assert stall.longer(5.0).mean_s == pytest.approx(mean_s + 5.0)


def test_all_time_is_in_one_class_with_all_kinds_of_nodes() -> None:
    one = job(
        Poisson(60.0),
        stall=STALL,
        rollback=True,
        shrinks=True,
        spares=1,
        wall=True,
        repair=Duration(median_s=90.0, sigma=1.0),
        lemons=Lemons(share=0.4, times=5.0, quarantine=3),
        slow=slow(40.0),
    )
    outcome = played(one, failures=200)
    total = outcome.useful_s + sum(outcome.lost_s.values())
    assert total == pytest.approx(np.full(TRIALS, outcome.horizon_s), rel=1e-9)
    assert all((times >= 0).all() for times in outcome.lost_s.values())
    assert outcome.lost_s["slow"].min() > 0 and outcome.swaps.min() > 0


def test_nodes_in_repair_are_those_of_failures_by_the_clock() -> None:
    """Failures come while the job runs, 300 s apart on average, and each is followed by a stall of
    100 s: one each 400 s, so that of repairs of 40,000 s there are 100 at a time, of 1,000 nodes;
    while the job runs, 99.75, as each is in repair during its own stall.
    """
    stall, repair = Duration(median_s=100.0), Duration(median_s=40_000.0)
    more: dict[str, Any] = {"rollback": False, "shrinks": True, "spares": 0, "save_s": 0.0}
    one = job(Poisson(300.0), nodes=1000, stall=stall, repair=repair, **more)
    going = 1.0 / (400.0 * math.expm1(1.0 / 300.0))  # a step of 1 s is lost with each failure
    assert formula(one) == pytest.approx(going * (1 - 0.09975), rel=1e-6)
    assert 1 - formula(one) / going == pytest.approx(_missing_of_a_loop(), abs=0.005)


@pytest.mark.slow
def test_a_node_that_is_in_repair_during_its_own_stall_slows_nobody_down_meanwhile() -> None:
    """Where a stall is a twentieth of a repair that shows; no node is missing for less."""
    more: dict[str, Any] = {"rollback": False, "shrinks": True, "spares": 0, "nodes": 20}
    repair = Duration(median_s=400.0)
    one = job(Poisson(300.0), stall=Duration(median_s=20.0), repair=repair, **more)
    outcome = played(one, failures=2000)
    assert same(outcome, formula(one))
    error = outcome.goodput.std(ddof=1) / math.sqrt(TRIALS)
    assert formula(one) * (20 / 320 / 20) > 4.5 * error, "the whole repair would be told from it"
    short = job(Poisson(300.0), stall=Duration(median_s=500.0), repair=repair, **more)
    assert same(played(short), formula(short)) and played(short).lost_s["reduced"].max() == 0


def _missing_of_a_loop() -> float:
    """The same, played: the share of nodes missing while the job runs, once repairs end too."""
    chance = random.Random(3)
    now_s, back, missing, ran_s = 0.0, deque[float](), 0.0, 0.0
    for number in range(20_000):
        until_s = now_s + chance.expovariate(1 / 300.0)
        while back and back[0] <= until_s:
            if number > 500 and back[0] > now_s:
                missing += (back[0] - now_s) * len(back)
                ran_s += back[0] - now_s
            now_s = max(now_s, back.popleft())
        if number > 500:
            missing += (until_s - now_s) * len(back)
            ran_s += until_s - now_s
        back.append(until_s + 40_000.0)
        now_s = until_s + 100.0
    return missing / ran_s / 1000


def test_binomial_numbers_are_all_that_matter() -> None:
    found = dict(binomial(20, 0.3))
    assert found[6] == pytest.approx(math.comb(20, 6) * 0.3**6 * 0.7**14)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-9)
    assert binomial(10, 0.0) == [(0, 1.0)] and binomial(10, 1.0) == [(10, 1.0)]
    many = binomial(16_384, 0.05)
    assert math.fsum(p for _, p in many) == pytest.approx(1.0, abs=1e-9) and len(many) < 1000
