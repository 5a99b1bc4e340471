"""What a gate says that it can see is what it sees, in simulations whose power is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from tests.harness.gating.test_gating import baseline_of, run_of
from trainchaos.harness.gating.gate import BaselineComparison, as_text, gate
from trainchaos.harness.gating.regression import (
    SEEN,
    Tolerance,
    compare,
    least_seen,
    tolerance_of,
)
from trainchaos.harness.judge.measure.measure import summarise

Draw = Callable[[random.Random], float]
SETS, TRIES = 40, 40


def heavy(drawn: random.Random) -> float:
    return 1 + 0.3 * drawn.expovariate(1)


def normal(drawn: random.Random) -> float:
    return math.exp(drawn.gauss(0, 0.2))


def share(drawn: random.Random) -> float:
    return 0.9 * math.exp(-abs(drawn.gauss(0, 0.05)))


@pytest.mark.parametrize(
    ("name", "draw", "n", "level"),
    [
        ("recovery_time", normal, 19, 0.05 / 12),
        ("recovery_time", heavy, 9, 0.05),
        ("goodput", share, 9, 0.05 / 6),
    ],
)
def test_a_change_that_is_stated_is_seen_nine_times_of_ten(
    name: str, draw: Draw, n: int, level: float
) -> None:
    """On average over what a run and its baseline may look like; a smaller one is seen less."""
    drawn = random.Random(5)
    tolerance = tolerance_of(summarise(name, []).unit)

    def sample(factor: float = 1.0) -> Sequence[float]:
        return [factor * draw(drawn) for _ in range(n)]

    def seen(change: float) -> float:
        factor = 1 + change if name == "recovery_time" else 1 - change
        red = [
            compare(summarise(name, sample(factor)), summarise(name, sample()), tolerance, level)
            for _ in range(TRIES)
        ]
        return sum(one.verdict == "fail" for one in red) / TRIES

    stated = [
        least_seen(summarise(name, sample()), summarise(name, sample()), tolerance, level)
        for _ in range(SETS)
    ]
    changes = [change for change in stated if change is not None]
    assert len(changes) == SETS
    power = sum(map(seen, changes)) / SETS
    assert SEEN - 0.06 <= power <= SEEN + 0.05, power
    assert sum(seen(change / 2) for change in changes) / SETS < power - 0.2


def test_what_cannot_be_seen_or_said() -> None:
    times = summarise("recovery_time", [0.4, 0.5, 0.6])
    tolerance = tolerance_of("s")
    assert least_seen(times, times, tolerance, 0.01) == math.inf, "3 arms of either side"
    never = summarise("recovery_time", [0.4, 0.5, math.inf])
    assert least_seen(never, times, tolerance, 0.05) is None
    assert least_seen(summarise("recovery_time", []), times, tolerance, 0.05) is None
    good = summarise("goodput", [0.8, 0.9, 0.85])
    assert least_seen(good, good, Tolerance(share=0.99), 0.05) == pytest.approx(0.99, abs=0.01)
    blurred = summarise("goodput", [0.8, 0.9, 0.85], 0.5)
    assert least_seen(blurred, blurred, tolerance_of("ratio"), 0.05) == math.inf


def test_the_tolerance_is_the_least_that_can_be_seen() -> None:
    """Of values that do not vary."""
    alike = summarise("recovery_time", [1.0] * 9)
    assert least_seen(alike, alike, tolerance_of("s"), 0.05) == pytest.approx(0.21)
    blurred = summarise("recovery_time", [1.0] * 9, 0.1)
    assert least_seen(blurred, blurred, tolerance_of("s"), 0.05) == pytest.approx(0.43)


def test_a_gate_says_what_it_can_see() -> None:
    drawn = random.Random(3)
    values = {
        "recovery_time": [normal(drawn) for _ in range(9)],
        "goodput": [share(drawn) for _ in range(9)],
        "steps_lost": [1.0] * 9,
    }
    against = BaselineComparison(baseline=baseline_of({"default": values}), metrics=tuple(values))
    text = as_text(gate(run_of({"default": values}), against), "")
    assert "a change for the worse of recovery_time by " in text
    assert " % or more would be seen 9 times of 10, of goodput by " in text
    assert "steps_lost" not in text
    few = {name: each[:3] for name, each in values.items()}
    against = BaselineComparison(baseline=baseline_of({"default": few}), metrics=tuple(few))
    text = as_text(gate(run_of({"default": few}), against), "")
    assert "no change of recovery_time, goodput would be seen, however large: repeat more" in text
