"""What step times say: slow ranks, late data, slow connections, and what is too short to count."""

from __future__ import annotations

from collections.abc import Callable

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import ActorLog, Log, make_log
from trainchaos.harness.explain.pace import slownesses

RANKS, STEPS = 4, 40
MS = 1_000_000


def run(seconds: Callable[[int, int], dict[str, float]]) -> Log:
    """Steps 1 to 20 of generation 1 and the rest of generation 2; ``seconds``: of rank and step."""
    actors = []
    for rank in range(RANKS):
        events = [
            Event(
                kind=Kind.STEP_COMMITTED,
                actor=f"w{rank}",
                seq=step - 1,
                time_ns=step * 50 * MS,
                generation=1 if step <= 20 else 2,
                step=step,
                data={
                    **dict.fromkeys(
                        ("world", "samples", "loss", "lr", "grad_norm", "optimizer_step"), 1
                    ),
                    "rank": rank,
                    "scheduler_step": step,
                    "seconds": {**USUAL, **seconds(rank, step)},
                },
            )
            for step in range(1, STEPS + 1)
        ]
        actors.append(ActorLog(actor=f"w{rank}", events=tuple(events), problems=(), ended=True))
    return make_log(actors)


USUAL = {"data": 0.001, "forward": 0.01, "backward": 0.02, "collective": 0.005}


def found(
    seconds: Callable[[int, int], dict[str, float]],
) -> list[tuple[str, tuple[int, ...], int]]:
    """What is slow, who, and from which step on."""
    return [(one.what, one.ranks, one.step) for one in slownesses(run(seconds))]


def test_nothing_is_slow_where_all_is_as_usual() -> None:
    assert found(lambda rank, step: {}) == []


def test_a_rank_that_computes_slowly_for_some_steps() -> None:
    def slow(rank: int, step: int) -> dict[str, float]:
        return {"forward": 0.1} if rank == 2 and 25 <= step < 30 else {}

    assert found(slow) == [("compute", (2,), 25)]


def test_two_slow_steps_are_no_slowness() -> None:
    def slow(rank: int, step: int) -> dict[str, float]:
        return {"forward": 0.1} if rank == 2 and step in (25, 26) else {}

    assert found(slow) == []


def test_ranks_that_are_slow_at_once_are_one_slowness() -> None:
    def slow(rank: int, step: int) -> dict[str, float]:
        return {"backward": 0.2} if rank in (0, 1) and 25 <= step < 35 else {}

    assert found(slow) == [("compute", (0, 1), 25)]


def test_late_data_are_of_the_rank_that_waits_for_them() -> None:
    def late(rank: int, step: int) -> dict[str, float]:
        if not 25 <= step < 30:
            return {}
        return {"data": 0.15} if rank == 1 else {"collective": 0.15}

    assert found(late) == [("data", (1,), 25)]


def test_collectives_that_are_slow_for_all_are_of_the_connections() -> None:
    assert found(lambda rank, step: {"collective": 0.1} if 25 <= step < 30 else {}) == [
        ("collective", (), 25)
    ]


def test_one_long_pause_counts_but_not_as_a_generation_begins() -> None:
    def paused(at: int) -> list[tuple[str, tuple[int, ...], int]]:
        return found(lambda rank, step: {"collective": 0.3} if step == at else {})

    assert paused(30) == [("pause", (), 30)]
    assert paused(21) == paused(22) == []  # the first steps of generation 2
