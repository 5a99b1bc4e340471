"""Every optimizer and every scheduler of torch: what a checkpoint in memory gives is the whole
state, bit for bit.
"""

from __future__ import annotations

import pytest

from tests.recovery.checkpoint.memory.test_memory_state import Rank, keeper
from tests.recovery.state.test_optimizers import (
    PAIRS,
    counting,
    everything,
    in_order,
    make,
    steps,
    train,
)
from trainchaos.recovery.state.state import TrainState

__all__ = ["keeper"]  # a fixture
pytestmark = pytest.mark.usefixtures("keeper")


def remembered(source: TrainState, *targets: TrainState) -> None:
    """As the keeper gives it, after the process that saved it has ended."""
    saver = Rank(source)
    saver.begin()
    saver.memory.close()
    for target in targets:
        taker = Rank(target)
        newest = taker.restore()
        assert newest is not None and newest.step == source.step
        taker.memory.close()


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_what_is_kept_in_memory_goes_on_as_if_nothing_had_happened(
    optimizer: str, scheduler: str
) -> None:
    """Into a process that never trained, and into one that went astray."""
    original = train(make(optimizer, scheduler), 5)
    fresh, astray = make(optimizer, scheduler, seed=1), train(make(optimizer, scheduler, seed=2), 3)
    remembered(original, fresh, astray)
    assert everything(fresh) == everything(astray) == everything(original)
    goal = everything(train(original, 4))
    assert everything(train(fresh, 4)) == everything(train(astray, 4)) == goal
    assert fresh.digests() == astray.digests() == original.digests()


@pytest.mark.parametrize("at", [1, 5])
def test_whatever_an_optimizer_keeps_is_kept_in_memory(at: int) -> None:
    """A plain number as step, lists, slots that come late, fields that change."""
    original, peers = steps(counting(0), at), [counting(1), steps(counting(2), 7 - at)]
    remembered(original, *peers)
    goal = in_order(steps(original, 4).optimizer.state_dict())
    assert [in_order(steps(peer, 4).optimizer.state_dict()) for peer in peers] == [goal, goal]
