"""What step times say: slow ranks, late data, slow connections, and what is too short to count."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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


def during(first: int, last: int, **seconds: float) -> Callable[[int, int], dict[str, float]]:
    """Rank 2 alone has these seconds in these steps."""
    return lambda rank, step: seconds if rank == 2 and first <= step <= last else {}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (lambda rank, step: {}, []),
        (during(25, 29, forward=0.1), [("compute", (2,), 25)]),
        (during(25, 26, forward=0.1), []),  # two slow steps are none
        (
            lambda rank, step: {"backward": 0.2} if rank < 2 and 25 <= step < 35 else {},
            [("compute", (0, 1), 25)],  # ranks that are slow at once
        ),
        (
            lambda rank, step: (
                {"data" if rank == 1 else "collective": 0.15} if 25 <= step < 30 else {}
            ),
            [("data", (1,), 25)],  # the others wait for who waits
        ),
        (
            lambda rank, step: {"collective": 0.1} if 25 <= step < 30 else {},
            [("collective", (), 25)],
        ),
        (lambda rank, step: {"collective": 0.3} if step == 30 else {}, [("pause", (), 30)]),
        # the first steps of generation 2
        (lambda rank, step: {"collective": 0.3} if step == 21 else {}, []),
        (lambda rank, step: {"collective": 0.3} if step == 22 else {}, []),
    ],
)
def test_what_step_times_say(
    seconds: Callable[[int, int], dict[str, float]], said: list[tuple[str, tuple[int, ...], int]]
) -> None:
    assert [(one.what, one.ranks, one.step) for one in slownesses(run(seconds))] == said
