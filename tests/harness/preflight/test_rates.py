"""Who is slow: bounds, comparisons with peers, regrouping."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from trainchaos.harness.preflight.compare import (
    FALSE_ALARMS,
    ROUNDS,
    baseline_limit,
    in_rounds,
    slow_among,
)
from trainchaos.harness.preflight.links import (
    Pair,
    Regrouped,
    explained,
    find_slow,
    matching,
)

SEEDS = range(100)


def test_rounds_are_medians_of_successive_parts() -> None:
    assert in_rounds([1.0, 1.0, 5.0, 5.0, 9.0, 9.0], 3) == [1.0, 5.0, 9.0]
    assert in_rounds([1.0, 2.0]) == [1.0, 2.0]


def test_the_limit_of_a_baseline_is_a_prediction_limit() -> None:
    level, limit = baseline_limit([90.0, 95.0, 100.0, 105.0, 110.0], 20)
    logs = [math.log(x) for x in (90.0, 95.0, 100.0, 105.0, 110.0)]
    mean = sum(logs) / 5
    scale = math.sqrt(sum((x - mean) ** 2 for x in logs) / 4)
    assert level == pytest.approx(mean)
    assert limit == pytest.approx(8.610 * scale * math.sqrt(1.2), rel=1e-3)
    _, floor = baseline_limit([100.0] * 5, 20)
    assert math.exp(-floor) == pytest.approx(0.9)
    _, floor = baseline_limit([100.0] * 5, 20, latency=True)
    assert math.exp(floor) == pytest.approx(2.0)


def test_a_baseline_alarms_as_seldom_as_it_states() -> None:
    draw = random.Random(1)
    alarms, tries = 0, 20_000
    bound = FALSE_ALARMS
    for _ in range(tries):
        values = [math.exp(draw.gauss(0.0, 0.2)) for _ in range(6)]
        level, limit = baseline_limit(values[:5], 1)
        alarms += math.log(values[5]) < level - limit
    expected = tries * bound
    assert abs(alarms - expected) < 4 * math.sqrt(expected)


def noisy(draw: random.Random, scale: float) -> float:
    """A factor with heavy tails: Student's t with 3 degrees of freedom."""
    chi = sum(draw.gauss(0.0, 1.0) ** 2 for _ in range(3))
    return math.exp(scale * draw.gauss(0.0, 1.0) / math.sqrt(chi / 3.0))


def test_a_slow_place_is_named_and_a_round_that_is_slow_is_not() -> None:
    values = {f"cpu:{i}": [50.0, 52.0, 49.0] for i in range(4)}
    assert not any(one.slow for one in slow_among(values).values())
    values["cpu:2"] = [30.0, 29.0, 31.0]
    compared = slow_among(values)
    assert [name for name, one in compared.items() if one.slow] == ["cpu:2"]
    assert compared["cpu:2"].ratio == pytest.approx(0.6, abs=0.02)
    assert compared["cpu:2"].ratio < compared["cpu:2"].bound <= 0.75
    values["cpu:2"] = [30.0, 29.0, 50.0]
    assert not any(one.slow for one in slow_among(values).values())


def test_who_is_a_fifth_slower_is_left_alone_and_one_place_has_no_peers() -> None:
    values = {"a": [100.0] * 3, "b": [100.0] * 3, "c": [80.0] * 3}
    assert not any(one.slow for one in slow_among(values).values())
    assert slow_among({"a": [1.0]}) == {} and slow_among({"a": [], "b": []}) == {}


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.3])
def test_places_that_are_alike_are_not_named(scale: float) -> None:
    alarms = 0
    for seed in SEEDS:
        draw = random.Random(seed)
        values = {f"cpu:{i}": [50.0 * noisy(draw, scale) for _ in range(ROUNDS)] for i in range(4)}
        alarms += any(one.slow for one in slow_among(values).values())
    assert alarms <= 100 * FALSE_ALARMS


class Links:
    """Rates between places: slow ones by a factor; what is measured is counted."""

    def __init__(
        self, seed: int = 0, scale: float = 0.05, slow: dict[object, float] | None = None
    ) -> None:
        self._draw, self._scale = random.Random(seed), scale
        self._slow = slow or {}
        self.asked: list[list[Pair]] = []

    def measure(self, pairs: Sequence[Pair]) -> dict[Pair, list[float]]:
        """ROUNDS of each; the pairs must be disjoint."""
        members = [place for pair in pairs for place in pair]
        assert len(members) == len(set(members)), "a place can be in one pair at a time"
        self.asked.append(list(pairs))
        return {pair: [self._rate(pair) for _ in range(ROUNDS)] for pair in pairs}

    def _rate(self, pair: Pair) -> float:
        factors = [f for who, f in self._slow.items() if who in pair or who == frozenset(pair)]
        return math.prod([1000.0, noisy(self._draw, self._scale), *factors])


def places(n: int) -> list[str]:
    """Of the CPU."""
    return [f"cpu:{i}" for i in range(n)]


@pytest.mark.parametrize("n", [4, 5, 6, 8, 9, 64])
@pytest.mark.parametrize("which", ["first", "last"])
def test_a_slow_place_is_found_by_regrouping(n: int, which: str) -> None:
    guilty = "cpu:1" if which == "first" else f"cpu:{n - 2}"
    links = Links(slow={guilty: 0.3})
    found = find_slow(places(n), links.measure)
    assert list(found.slow) == [(guilty,)] and not found.unclear
    assert found.slow[guilty,].rate < found.slow[guilty,].bound < found.slow[guilty,].reference
    partners = {place for pair in found.slow[guilty,].tried for place in pair} - {guilty}
    assert len(partners) >= 2, "it is tried with two good partners"
    assert sum(map(len, links.asked)) <= 4 * (n // 2) + 1, "not all pairs are measured"


@pytest.mark.parametrize("n", [4, 6, 64])
def test_a_slow_link_is_told_from_slow_places(n: int) -> None:
    pair = matching(places(n), 0)[1]
    found = find_slow(places(n), Links(slow={frozenset(pair): 0.2}).measure)
    assert list(found.slow) == [pair]
    assert explained(found, {})["cpu:2+cpu:3"].state == "unfit"


def test_two_slow_places_of_one_pair_or_of_two_are_both_found() -> None:
    for guilty in ({"cpu:2", "cpu:3"}, {"cpu:1", "cpu:6"}):
        found = find_slow(places(8), Links(slow=dict.fromkeys(guilty, 0.3)).measure)
        assert {*found.slow} == {(place,) for place in guilty}


def test_a_pair_that_cannot_exchange_is_traced_to_its_place() -> None:
    def measure(pairs: Sequence[Pair]) -> dict[Pair, list[float]]:
        return {pair: [900.0] * ROUNDS for pair in pairs if "cpu:3" not in pair}

    found = find_slow(places(4), measure)
    assert list(found.slow) == [("cpu:3",)]
    rows = explained(
        found, {pair: "no exchange (cpu:3: gone)" for pair in found.slow["cpu:3",].tried}
    )
    assert {place: row.state for place, row in rows.items()} == {
        "cpu:0+cpu:1": "fit",
        "cpu:2+cpu:3": "unmeasured",
        "cpu:3": "unfit",
    }
    assert "cpu:3: gone" in rows["cpu:3"].said


def test_a_disturbance_that_passes_names_nobody() -> None:
    turn = 0

    def measure(pairs: Sequence[Pair]) -> dict[Pair, list[float]]:
        nonlocal turn
        turn += 1
        return {p: [200.0 if turn == 1 and "cpu:0" in p else 1000.0] * ROUNDS for p in pairs}

    found = find_slow(places(4), measure)
    assert not found.slow and found.unclear == [("cpu:0", "cpu:1")]
    assert [row.state for row in explained(found, {}).values()] == ["unmeasured", "fit"]


def test_wrong_bytes_are_unfit_without_peers() -> None:
    found = Regrouped(pairs={("a", "b"): [0.0] * ROUNDS})
    (row,) = explained(found, {("a", "b"): "2 exchanges did not arrive as they were sent"}).values()
    assert row.state == "unfit" and "did not arrive" in row.said
    assert explained(Regrouped(), {("a", "c"): "wrong"})["a+c"].state == "unfit"


def test_few_places_are_measured_and_not_named() -> None:
    assert find_slow(["cpu:0"], Links().measure).pairs == {}
    assert list(find_slow(places(2), Links().measure).pairs) == [("cpu:0", "cpu:1")]
    assert len(find_slow(places(3), Links().measure).pairs) == 2


@pytest.mark.parametrize("scale", [0.05, 0.2])
@pytest.mark.parametrize("n", [4, 8])
def test_healthy_links_are_not_named(n: int, scale: float) -> None:
    found = [find_slow(places(n), Links(seed, scale).measure) for seed in SEEDS]
    assert [one for one in found if one.slow] == []
