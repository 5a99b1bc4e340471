"""Formulas against published and independently computed values."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest

from trainchaos.harness.projection import closed
from trainchaos.harness.projection.laws import Law, Trace, Weibull
from trainchaos.recovery.policy.interval import optimum_s


@pytest.mark.parametrize(("mtbf", "best"), [(1440.0, 116.690), (360.0, 56.714)])
def test_the_best_interval_is_where_goodput_is_highest_and_near_dalys_estimate(
    mtbf: float, best: float
) -> None:
    """Daly prints 117 and 57 minutes for saves of 5."""
    found = closed.best_interval(5.0, mtbf)
    assert found == pytest.approx(best, abs=5e-4)
    assert found == pytest.approx(optimum_s(5.0, mtbf), abs=2e-3)
    top = closed.goodput(found, 5.0, 10.0, 0.0, mtbf)
    assert all(closed.goodput(found * part, 5.0, 10.0, 0.0, mtbf) < top for part in (0.99, 1.01))


@pytest.mark.parametrize("ratio", [1e-16, 1e-12, 9.9e-9, 1.01e-8, 1e-4])
def test_the_best_interval_of_very_rare_failures_is_youngs(ratio: float) -> None:
    """sqrt(2 delta M) - 2 delta / 3, to which the exact one tends."""
    found = closed.best_interval(5.0, 5.0 / ratio)
    assert found == pytest.approx(math.sqrt(50.0 / ratio) - 10 / 3, rel=max(1e-7, 2 * ratio))


def test_what_takes_a_thousand_times_as_long_as_failures_leave_it_is_never_done() -> None:
    assert closed.goodput(1000.0, 5.0, 120.0, 0.0, 1.0) == 0.0
    assert closed.goodput(1.0, 0.0, 0.0, 0.0, 1e-9) == 0.0


@pytest.mark.parametrize(("save", "mtbf"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, math.nan)])
def test_no_interval_is_best_for_what_takes_no_time(save: float, mtbf: float) -> None:
    with pytest.raises(ValueError):
        closed.best_interval(save, mtbf)


@pytest.mark.parametrize(
    ("tau", "delta", "restart", "down", "mtbf", "share"),
    [
        (117, 5, 10, 0, 1440, 0.91261),
        (57, 5, 10, 0, 360, 0.81938),
        (30, 1, 5, 0, 180, 0.86251),
        (30, 1, 0, 5, 180, 0.86283),
    ],
)
def test_goodput_at_a_constant_rate(
    tau: float, delta: float, restart: float, down: float, mtbf: float, share: float
) -> None:
    assert closed.goodput(tau, delta, restart, down, mtbf) == pytest.approx(share, abs=5e-6)


@pytest.mark.parametrize(
    ("law", "share"),
    [
        (Weibull(180.0, 0.5), 0.8781),
        (Weibull(180.0, 0.7), 0.8683),
        (Weibull(180.0, 0.78), 0.8662),
        (Weibull(180.0, 1.0), 0.8628),
        (Weibull(180.0), 0.8628),
    ],
)
def test_goodput_of_any_law(law: Law, share: float) -> None:
    assert closed.goodput_of_law(law, 30.0, 1.0, 5.0) == pytest.approx(share, abs=5e-5)


@pytest.mark.parametrize("law", [Weibull(180.0), Weibull(180.0, 0.5)])
def test_where_work_done_again_is_useful_only_saves_and_stalls_are_lost(law: Law) -> None:
    share = 30 / 31 * 180 / 185
    assert closed.goodput_of_law(law, 30.0, 1.0, 5.0, again=True) == pytest.approx(share)
    assert closed.goodput(30.0, 1.0, 0.0, 5.0, 180.0, again=True) == pytest.approx(share)


def test_a_law_whose_sum_does_not_end_is_refused() -> None:
    with pytest.raises(ValueError, match="too frequent"):
        closed.goodput_of_law(Weibull(1e9), 1e-3, 0.0, 0.0)


def test_where_recovery_is_a_large_share_the_linear_form_is_too_low() -> None:
    mtbf = 1440 / (2048 * 6.5e-3)
    assert closed.goodput_of_law(Weibull(mtbf), 60.0, 1e-9, 5.0) == pytest.approx(0.7151, abs=5e-5)


@pytest.mark.parametrize("load", [0.3, 7.762, 40.0])
def test_spares_of_a_job_that_goes_on_are_poisson(load: float) -> None:
    share, k = math.exp(-load), 0
    while share < 0.99:
        k += 1
        share += math.exp(k * math.log(load) - load - math.lgamma(k + 1))
    assert closed.spares_for(0.99, load) == k


def test_spares_for_failures_that_take_several_nodes() -> None:
    """Poisson in pairs; and half of them eight nodes, here by a plain sum over how many of each
    kind are in repair. Of very many, the normal distribution.
    """
    assert closed.spares_for(0.99, 4.0, (0.0, 1.0)) == 2 * closed.spares_for(0.99, 4.0)

    def poisson(mean: float, count: int) -> float:
        return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))

    several = (0.5, *([0.0] * 6), 0.5)
    found = closed.spares_for(0.95, 3.0, several)
    shares = {
        k: sum(
            poisson(1.5, a) * poisson(1.5, b)
            for a in range(60)
            for b in range(60)
            if a + 8 * b <= k
        )
        for k in (found - 1, found)
    }
    assert shares[found - 1] < 0.95 <= shares[found]
    many = closed.spares_for(0.99, 5000.0)
    assert many == pytest.approx(5000 + 2.326 * math.sqrt(5000), abs=3)
    assert closed.spares_for(0.5, 0.0) == 0 and closed.spares_for(0.99, 1e9) is None


@pytest.mark.slow
def test_all_nodes_are_there_as_long_as_spares_say() -> None:
    """A loop in which failures go on while nodes are missing, alone and several at once."""
    chance = random.Random(5)
    for several in ((1.0,), (0.8, 0.0, 0.2)):
        spares = closed.spares_for(0.9, 4.0, several)
        now_s, back, there_s = 0.0, deque[tuple[float, int]](), 0.0
        while now_s < 40_000.0:
            until_s = now_s + chance.expovariate(1.0)
            while now_s < until_s:
                upto_s = min(until_s, back[0][0]) if back else until_s
                if sum(nodes for _, nodes in back) <= spares:
                    there_s += upto_s - now_s
                now_s = upto_s
                if back and back[0][0] <= now_s:
                    back.popleft()
            taken = chance.choices(range(1, len(several) + 1), several)[0]
            back.append((now_s + 4.0, taken))
        share = there_s / now_s
        less = closed.spares_for(share - 0.01, 4.0, several)
        assert less <= spares <= closed.spares_for(share + 0.01, 4.0, several)


def test_nodes_missing_beyond_the_spares() -> None:
    assert closed.missing_nodes(0, 2.5) == pytest.approx(2.5)
    spares, load = 3, 2.5
    terms = [math.exp(-load) * load**a / math.factorial(a) for a in range(60)]
    sum_of = sum((a - spares) * p for a, p in enumerate(terms) if a > spares)
    assert closed.missing_nodes(spares, load) == pytest.approx(sum_of)


def test_a_trace_has_the_mean_and_the_survival_of_what_was_seen() -> None:
    trace = Trace([10.0, 20.0, 30.0])
    assert trace.mean_s == 20.0
    import numpy as np

    assert trace.survival(np.asarray([0.0, 10.0, 25.0, 30.0])).tolist() == pytest.approx(
        [1.0, 2 / 3, 1 / 3, 0.0]
    )
