"""Events of several actors are merged in one order, and found by kind in that order."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from trainchaos.chaos.events.log import ActorLog, Event, Kind, make_log

KINDS = (Kind.STEP_COMMITTED, Kind.BATCH_TAKEN, Kind.PARKED, Kind.BUSY)


def event(rng: random.Random, actor: str, seq: int, time_ns: int) -> Event:
    return Event(
        kind=rng.choice(KINDS), actor=actor, seq=seq, time_ns=time_ns, generation=1, step=None
    )


def logs(rng: random.Random, disorder: str) -> list[ActorLog]:
    """Logs of actors whose names and times tie, and whose file names sort unlike their names."""
    found = []
    for actor in rng.sample(["w1", "w10", "w2", "a-b", "a", "orchestrator"], 4):
        times = sorted(rng.choices(range(8), k=12))
        events = [event(rng, actor, seq, time_ns) for seq, time_ns in enumerate(times)]
        if disorder == "times":
            rng.shuffle(times)
            events = [event(rng, actor, seq, time_ns) for seq, time_ns in enumerate(times)]
        elif disorder == "numbers":
            rng.shuffle(events)
        elif disorder == "twice":
            events += events[:3]
        elif disorder == "foreign":
            events[5] = event(rng, "w2", 0, 3)
        found.append(ActorLog(actor=actor, events=tuple(events), problems=(), ended=True))
    return found


def by_all(actors: Sequence[ActorLog]) -> list[Event]:
    """The definition: by (time, actor, seq), equal ones in the order of the logs."""
    return sorted(
        (e for log in actors for e in log.events), key=lambda e: (e.time_ns, e.actor, e.seq)
    )


@pytest.mark.parametrize("disorder", ["", "times", "numbers", "twice", "foreign"])
def test_the_order_is_by_time_then_actor_then_number(disorder: str) -> None:
    for seed in range(50):
        actors = logs(random.Random(seed), disorder)
        merged = list(make_log(actors).events)
        due = by_all(sorted(actors, key=lambda log: log.actor))
        assert [id(e) for e in merged] == [id(e) for e in due]


def test_events_of_kinds_are_those_of_the_whole_in_order() -> None:
    rng = random.Random(1)
    log = make_log(logs(rng, "times"))
    for _ in range(50):
        kinds = tuple(rng.choices((*KINDS, Kind.DECISION), k=rng.randrange(4)))
        assert list(log.of(*kinds)) == [e for e in log.events if e.kind in kinds]
