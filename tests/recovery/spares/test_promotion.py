"""What ranks send each other at a promotion: nothing, the last step, or word that a copy is due.
Three ranks on three threads, over exchanges in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recovery.spares.test_following import Pair, Side, adam
from tests.support.devices import DEVICES
from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.rank.acquire_state import wanting
from trainchaos.recovery.rank.membership import HeldState
from trainchaos.recovery.transport.wire import StateSource

SOURCE, SPARE = 0, 2


class Exchange:
    """What three threads exchange, one collective after the other."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(3, timeout=LIMIT_S)
        self.lock = threading.Lock()
        self.total = torch.zeros(0)
        self.broadcasts = 0


class FakeCircle:
    """One rank's side of it."""

    ranks = (0, 1, 2)
    backend = "gloo"

    def __init__(self, shared: Exchange, rank: int) -> None:
        self._shared, self.rank = shared, rank

    def start_all_reduce(self, tensor: Tensor) -> None:
        shared = self._shared
        if shared.barrier.wait() == 0:
            shared.total = torch.zeros_like(tensor)
        shared.barrier.wait()
        with shared.lock:
            shared.total += tensor
        shared.barrier.wait()
        tensor.copy_(shared.total)
        shared.barrier.wait()

    def broadcast(self, tensor: Tensor, source: int) -> None:
        shared = self._shared
        if self.rank == source:
            shared.total, shared.broadcasts = tensor, shared.broadcasts + 1
        shared.barrier.wait()
        if self.rank != source:
            tensor.copy_(shared.total)
        shared.barrier.wait()

    def wait(self, work: object) -> None:
        assert work is None

    def read(self, values: Tensor) -> Any:
        return values.tolist()


class Promotion:
    """Rank 0 feeds, and has kept its last step; rank 1 is as it is; rank 2 is the spare."""

    def __init__(self, device: str) -> None:
        self.pair = Pair(adam, device)
        self.other = Side(adam, device)
        self.shared = Exchange()

    def rank(self, rank: int, *, receives: bool, follower: Any, state: Any, feeds: Any) -> Any:
        job = SimpleNamespace(
            rank=rank,
            state=state,
            check=lambda: None,
            marks=SimpleNamespace(touch=lambda: None),
            member=SimpleNamespace(holding=HeldState(valid=not receives)),
        )
        live = SimpleNamespace(feeds=feeds, follower=follower, promoted=lambda: None)
        step = self.pair.rank.state.step
        order = StateSource(source=SOURCE, receives=receives, live=step)
        group: Any = SimpleNamespace(holders=FakeCircle(self.shared, rank))
        return wanting(job, live, order, group)  # type: ignore[arg-type]

    def play(self) -> list[tuple[tuple[int, ...], int]]:
        """What each rank learns: who copies, and the bytes that came."""
        pair, nobody = self.pair, SimpleNamespace(retained=None)
        sides = [
            {"receives": False, "follower": None, "state": pair.rank.state, "feeds": pair.feeds},
            {"receives": False, "follower": None, "state": self.other.state, "feeds": nobody},
            {
                "receives": True,
                "follower": pair.follower,
                "state": pair.spare.state,
                "feeds": nobody,
            },
        ]
        with ThreadPoolExecutor(3) as pool:
            ran = [pool.submit(self.rank, rank, **side) for rank, side in enumerate(sides)]
            return [one.result(LIMIT_S) for one in ran]


@pytest.fixture(params=DEVICES)
def promotion(request: pytest.FixtureRequest) -> Iterator[Promotion]:
    made = Promotion(request.param)
    made.pair.follower.start()
    yield made
    made.pair.close()


def follow(promotion: Promotion, steps: int) -> None:
    """The spare follows so many steps, and its feeder then goes."""
    pair = promotion.pair
    pair.feed()
    for _ in range(steps):
        pair.step()
        pair.spare.log.wait(Kind.SPARE_SYNCED)
    pair.feeds.leaves()


def test_nothing_is_sent_to_a_spare_that_is_up_to_date(promotion: Promotion) -> None:
    follow(promotion, 3)
    assert promotion.play() == [((), 0)] * 3
    assert promotion.shared.broadcasts == 0
    promotion.pair.same()


def test_a_spare_that_lacks_the_last_step_gets_its_gradients(promotion: Promotion) -> None:
    follow(promotion, 3)
    promotion.pair.step()  # nobody is fed any more
    size = 4 * sum(p.numel() for p in promotion.pair.rank.state.trained.values())
    found = promotion.play()
    assert [copies for copies, _ in found] == [()] * 3
    assert found[0][1] == found[1][1] == 0 < size <= found[SPARE][1]
    assert promotion.shared.broadcasts
    promotion.pair.same()


def test_a_spare_that_lacks_two_steps_needs_a_copy(promotion: Promotion) -> None:
    follow(promotion, 3)
    promotion.pair.step()
    promotion.pair.step()
    assert promotion.play() == [((SPARE,), 0)] * 3
    assert promotion.shared.broadcasts == 0


def test_a_spare_that_never_followed_needs_a_copy(promotion: Promotion) -> None:
    promotion.pair.step()
    assert promotion.play() == [((SPARE,), 0)] * 3


def test_where_nobody_who_holds_the_same_part_receives_nothing_is_compared() -> None:
    """Another part's rank was lost; here are the ranks of this one."""
    ended: list[str] = []
    live: Any = SimpleNamespace(follower=None, promoted=lambda: ended.append("never"))
    job: Any = SimpleNamespace(member=SimpleNamespace(holding=HeldState(valid=True)), rank=1)
    group: Any = SimpleNamespace(holders=None)
    assert wanting(job, live, StateSource(live=3), group) == ((), 0) and not ended


def test_a_spare_with_another_state_of_the_same_step_needs_a_copy(promotion: Promotion) -> None:
    follow(promotion, 3)
    promotion.pair.follower.settle(3, lambda: None)
    with torch.no_grad():
        for parameter in promotion.pair.spare.model.parameters():
            parameter.add_(1e-3)
    assert promotion.play() == [((SPARE,), 0)] * 3
