"""Spares that follow a part of the model are spares for its ranks alone: what the checkers ask of a
job that has too few ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support import arms
from tests.support.logs import Script
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers.job.ending import fills_a_replica
from trainchaos.harness.judge.checkers.job.world import without_need
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of


def shrunk(places: dict[str, int], lost: Sequence[str], spares: int = 2) -> History:
    """Of a job of two replicas of two parts, of which ``lost`` are gone when two ranks go on.
    ``places``: the part that each spare was told to follow.
    """
    script = Script("hot-spare", spares=spares)
    script.form(("w0", "w1", "w2", "w3"), state="initial", cause="start", resume=0)
    for name, shard in places.items():
        script.orchestrator(Kind.SPARE_PLACED, process=name, shard=shard)
    for number, name in enumerate(lost):
        rank = int(name[1:]) if name.startswith("w") else None
        script.orchestrator(
            Kind.FAILURE_DETECTED,
            step=1,
            failure=number + 1,
            cause="exit",
            process=name,
            rank=rank,
            detail="signal 9",
        )
        script.exit(name, signal=9, expected=False)
    stay = [name for name in ("w0", "w1", "w2", "w3") if name not in lost]
    script.form(stay[:2], state="peer", cause="failure", resume=0)
    for event in script.find(Kind.GENERATION_STARTED):
        event.data["shards"] = 2
    return history_of(script.log())


PLACES = {"s0": 0, "s1": 1}


@pytest.mark.parametrize(
    ("places", "lost", "needless"),
    [
        (PLACES, ["w3"], True),
        (PLACES, ["w2", "w3"], True),
        (PLACES, ["w1", "w3"], False),
        (PLACES, ["w3", "s1"], False),
        (PLACES, ["w3", "s0"], True),
        ({}, ["w1", "w3"], True),
        ({"s0": 0}, ["w3"], True),
        ({"s0": 0}, ["w1", "w3"], False),
    ],
    ids=["one", "one-each", "two-of-one", "its-own", "another", "any", "free", "one-free"],
)
def test_ranks_are_given_up_only_where_the_spares_of_their_part_are_gone(
    places: dict[str, int], lost: list[str], needless: bool
) -> None:
    history = shrunk(places, lost)
    words = without_need(history, history.generations[-1])
    assert words == (f"after {len(lost)} losses with 2 spares" if needless else "")


def test_a_third_spare_serves_the_part_that_it_follows() -> None:
    history = shrunk({**PLACES, "s2": 1}, ["w1", "w3"], spares=3)
    assert without_need(history, history.generations[-1])
    history = shrunk({**PLACES, "s2": 0}, ["w1", "w3"], spares=3)
    assert not without_need(history, history.generations[-1])


@pytest.mark.parametrize(
    ("places", "fills"),
    [({}, True), (PLACES, True), ({"s0": 1, "s1": 1}, False), ({"s0": 1}, True)],
    ids=["any", "each", "alike", "one-free"],
)
def test_idle_spares_fill_a_replica_where_each_part_has_one(
    places: dict[str, int], fills: bool
) -> None:
    history = shrunk(places, ["w2", "w3"])
    assert fills_a_replica(history, {"s0": 30, "s1": 30}) == fills


def test_a_log_without_places_is_judged_as_before() -> None:
    history = history_of(arms.hot_spare().log())
    assert without_need(history, history.generations[-1]) == "after 1 losses with 1 spares"
