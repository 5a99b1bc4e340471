"""What few arms leave open of a mean: how often its interval holds, of arms that loops play."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.harness.projection.test_project_compare import BASE, MTBF_S, STALL_S, STEP_S, cells
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.projection.compare import Scatter, compared
from trainchaos.harness.projection.observed import Arm, Group

REPEATS = 80


@cache
def cell() -> Cell:
    """Read once, which takes longer than to play an arm."""
    (found,) = cells("hot-spare")
    return found


def lived(chance: random.Random, repeat: int, faster: float, longer: float | None) -> Arm:
    """An arm whose steps and recoveries take their own share of the usual; None: a control."""
    took_s = STEP_S / BASE / faster
    steps = left = cell().scenario.workload.steps
    now_s, stalls = 0.0, []
    due_s = math.inf if longer is None else chance.expovariate(1 / MTBF_S)
    while due_s < now_s + left * took_s:
        left -= max(0, int((due_s - now_s) / took_s))
        stalls.append(STALL_S * (longer or 1.0) * chance.uniform(0.8, 1.2))
        now_s = max(now_s, due_s) + stalls[-1]
        due_s += chance.expovariate(1 / MTBF_S)
    active_s = now_s + left * took_s
    return Arm(
        run="one",
        repeat=repeat,
        goodput=steps * STEP_S / active_s,
        failures=len(stalls),
        stalled_s=math.fsum(stalls),
        degraded_s=0.0,
        step_s=STEP_S / faster,
        clear=BASE * faster,
    )


def lives(
    chance: random.Random, arms: int, *, steps: float = 0.0, stalls: float = 0.0, control: float = 0
) -> Group:
    """So many arms and six controls. The standard deviations are of logarithms: of the speeds of
    arms and of controls, and of the mean recoveries of arms.
    """
    faulted = [
        lived(
            chance,
            n,
            math.exp(min(0.0, chance.gauss(-0.25, steps))),
            math.exp(chance.gauss(0, stalls)),
        )
        for n in range(arms)
    ]
    controls = [
        replace(lived(chance, n, math.exp(min(0.1, chance.gauss(0, control))), None), clear=BASE)
        for n in range(6)
    ]
    incidents = [one.stalled_s / one.failures for one in faulted for _ in range(one.failures)]
    return Group(
        cell=cell(),
        faulted=faulted,
        controls=controls,
        stalls_s=incidents,
    )


@pytest.mark.parametrize(
    ("arms", "differ", "widest"),
    [
        (2, {"steps": 0.1}, 0.6),
        (3, {"steps": 0.1}, 0.35),
        (6, {"steps": 0.1}, 0.25),
        (6, {"stalls": 0.5}, 0.2),
        (1, {"steps": 0.1, "control": 0.1}, 0.35),
    ],
)
@pytest.mark.sample(1)
@pytest.mark.slow
def test_another_mean_is_within_the_interval_as_often_as_it_says(
    arms: int, differ: dict[str, float], widest: float
) -> None:
    """The mean of three other arms, of 95 in 100; here each time with other arms for the costs. An
    interval that always holds because it is wide is no better.
    """
    inside, widths = 0, []
    for repeat in range(REPEATS):
        chance = random.Random(repeat)
        source, group = (lives(chance, count, **differ) for count in (arms, 3))
        found = compared(group, source, "others", np.random.default_rng(repeat), 400)
        mean = statistics.fmean(arm.goodput for arm in group.faulted)
        inside += found.low <= mean <= found.high
        widths.append(found.high - found.low)
        assert 0.0 <= found.low <= found.projected <= found.high <= 1.0
    assert inside >= 0.9 * REPEATS and statistics.median(widths) < widest


def test_a_mean_of_four_is_known_by_students_t() -> None:
    """3.182 with 3 degrees of freedom."""
    scatter = Scatter(spread=0.2, count=4, degrees=3)
    assert scatter.error == pytest.approx(3.182446 * 0.2 / 2)
    means, spreads = scatter.draw(np.random.default_rng(1), 100_000)
    low, high = np.percentile(means, [2.5, 97.5])
    assert (-low, high) == pytest.approx((scatter.error, scatter.error), rel=0.03)
    # 0.352 and 7.815: 5 and 95 % of chi-squared with 3 degrees of freedom
    found = np.percentile(spreads, [5, 95])
    assert found == pytest.approx([0.2 * (3 / 7.815) ** 0.5, 0.2 * (3 / 0.352) ** 0.5], rel=0.02)


def test_an_arm_that_is_faster_than_its_control_earns_no_more() -> None:
    source = lives(random.Random(1), 3)
    same, faster = (
        replace(source, faulted=[replace(one, clear=clear) for one in source.faulted])
        for clear in (BASE, 1.0)
    )
    first, second = (
        compared(source, costs, "others", np.random.default_rng(0), 400) for costs in (faster, same)
    )
    assert first == second
