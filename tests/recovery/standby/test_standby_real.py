"""A job whose next group stands by when a rank is killed uses it, and forms others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.recovery.test_run import EPOCHS, RECOVERABLE, start, unharmed
from tests.support.running import Running, kill
from trainchaos.chaos.events.log import Kind

__all__ = ["start", "unharmed"]
pytestmark = pytest.mark.real


def lost_in_standing_by(job: Running, generation: int) -> set[int]:
    """Ranks whose loss a group of this generation is ready for."""
    formed = job.of("orchestrator", Kind.STANDBY_FORMED)
    return {event.data["lost"] for event in formed if event.generation == generation}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "members", "then"),
    [
        (("--strategy", "hot-spare", "--spares", "1"), ["w0", "w1", "s4", "w3"], {0, 1, 2, 3}),
        pytest.param(
            ("--strategy", "drop-replica", "--param", "rejoin=false"),
            ["w0", "w1", "w3"],
            {0, 1, 2},
            marks=pytest.mark.long,
        ),
    ],
    ids=["swap", "drop"],
)
def test_the_group_for_a_loss_is_used_and_the_next_ones_are_formed(
    start: Callable[..., Running],
    unharmed: dict[str, object],
    options: tuple[str, ...],
    members: list[str],
    then: set[int],
) -> None:
    job = start("--ranks", "4", *options, RECOVERABLE, EPOCHS)
    job.wait_for(lambda: lost_in_standing_by(job, 1) == {0, 1, 2, 3})
    kill(job.pid_of("w2"))
    job.wait_for(lambda: lost_in_standing_by(job, 2) == then)
    assert job.end() == 0, job.said
    (ready,) = (e for e in job.of("orchestrator", Kind.GENERATION_READY) if e.generation == 2)
    assert ready.data["members"] == members
    for name in members:
        (formed,) = (e for e in job.of(name, Kind.GROUP_FORMED) if e.generation == 2)
        assert formed.data["standby"] is True
    if "s4" in members:
        assert job.digest() == unharmed
