"""Places with more incidents than chance allows: how often a healthy one is named, and a bad one
found.
"""

from __future__ import annotations

import math
import random

import pytest

from trainchaos.chaos.stats import poisson_upper
from trainchaos.recovery.health.lemons import FALSE_ALARM, FEWEST, Record, lemons

HOUR_S = 3600.0


def poisson(draw: random.Random, mean: float) -> int:
    """By the time between events, which is exponential."""
    count, at = 0, draw.expovariate(1.0)
    while at < mean:
        count, at = count + 1, at + draw.expovariate(1.0)
    return count


def fleet(
    draw: random.Random, *, places: int, per_hour: float, bad: dict[int, float] | None = None
) -> dict[str, Record]:
    """Places in use for 20 to 200 hours. ``bad``: by how much some are worse."""
    found = {}
    for index in range(places):
        hours = draw.uniform(20.0, 200.0)
        rate = per_hour * (bad or {}).get(index, 1.0)
        incidents = poisson(draw, rate * hours)
        found[f"host-{index}"] = Record(incidents=incidents, used_s=hours * HOUR_S)
    return found


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("per_hour", [0.002, 0.05])
def test_fleets_that_are_alike_have_lemons_named_no_more_often_than_stated(
    per_hour: float,
) -> None:
    draw, rate, fleets = random.Random(7), 0.05, 400
    named = sum(
        bool(lemons(fleet(draw, places=20, per_hour=per_hour), false_alarm=rate))
        for _ in range(fleets)
    )
    # The stated rate is refuted if the lower bound of what was seen is above it: named fleets of a
    # rate of 0.05 exceed this count with a probability of 1e-6.
    assert named <= fleets * rate + 5 * math.sqrt(fleets * rate), named
    assert poisson_upper(named) < fleets * 2 * rate


@pytest.mark.slow
def test_places_that_are_worse_are_found_and_no_others() -> None:
    draw, right, wrong, fleets = random.Random(11), 0, 0, 100
    for _ in range(fleets):
        found = lemons(fleet(draw, places=32, per_hour=0.02, bad={3: 12.0, 9: 12.0}))
        names = {one.place for one in found}
        right += len(names & {"host-3", "host-9"})
        wrong += len(names - {"host-3", "host-9"})
    assert right >= 0.9 * 2 * fleets, right
    assert wrong <= 0.03 * (right + wrong), wrong


def test_one_lemon_does_not_hide_another() -> None:
    records = {f"h{index}": Record(incidents=1, used_s=HOUR_S) for index in range(20)}
    records |= {"a": Record(incidents=40, used_s=HOUR_S), "b": Record(incidents=12, used_s=HOUR_S)}
    found = lemons(records)
    assert [one.place for one in found] == ["a", "b"]
    assert found[1].expected == pytest.approx(1.0), "without the first"
    assert found[0].limit == pytest.approx(FALSE_ALARM / 22)


def test_incidents_spread_evenly_name_nobody() -> None:
    assert lemons({f"h{n}": Record(incidents=50, used_s=HOUR_S) for n in range(8)}) == ()


def test_a_place_in_use_for_longer_may_have_more() -> None:
    records = {f"h{n}": Record(incidents=2, used_s=HOUR_S) for n in range(10)}
    assert lemons(records | {"long": Record(incidents=40, used_s=20 * HOUR_S)}) == ()
    assert len(lemons(records | {"long": Record(incidents=40, used_s=HOUR_S)})) == 1


def test_few_incidents_are_no_history() -> None:
    many = {f"h{n}": Record(incidents=0, used_s=1000 * HOUR_S) for n in range(5)}
    for incidents, named in ((FEWEST - 1, 0), (FEWEST, 1)):
        assert len(lemons(many | {"new": Record(incidents=incidents, used_s=HOUR_S)})) == named


def test_who_has_nobody_to_compare_with_is_not_judged() -> None:
    assert lemons({}) == lemons({"a": Record(incidents=90, used_s=HOUR_S)}) == ()
    unused = {"b": Record(incidents=0, used_s=0.0)}
    assert lemons({"a": Record(incidents=90, used_s=HOUR_S)} | unused) == ()


@pytest.mark.parametrize("rate", [0.0, 1.0, -1.0, math.nan])
def test_a_rate_is_a_probability(rate: float) -> None:
    with pytest.raises(ValueError, match="within"):
        lemons({}, false_alarm=rate)
