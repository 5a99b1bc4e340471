"""A rank feeds a spare, in this process: whatever a step changes, both hold the same afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from tests.support.devices import DEVICES
from tests.support.running import LIMIT_S, until
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.buckets import Bucket
from trainchaos.recovery.collectives.reduce import GradientReducer
from trainchaos.recovery.spares import feeds, frames
from trainchaos.recovery.spares.feed import Item
from trainchaos.recovery.spares.feeds import Feeds
from trainchaos.recovery.spares.follower import Follower
from trainchaos.recovery.spares.hostcopy import HostCopy
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.transport.wire import Feed

LAG = 3
MOST_STEPS = 500
Optimized = Callable[[list[nn.Parameter]], Optimizer]


class Log:
    """Events, to be waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[Kind, dict[str, Any]]] = []
        self.news = threading.Condition()

    def write(self, kind: Kind, /, **data: Any) -> None:
        with self.news:
            self.events.append((kind, data))
            self.news.notify_all()

    def wait(self, kind: Kind, number: int = 1) -> dict[str, Any]:
        def found() -> list[dict[str, Any]]:
            return [data for one, data in self.events if one is kind]

        with self.news:
            assert self.news.wait_for(lambda: len(found()) >= number, LIMIT_S), self.events
        return found()[number - 1]


class Side:
    """A process's model and what belongs to it."""

    def __init__(self, make: Optimized, device: str = "cpu") -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
        optimizer = make(list(self.model.parameters()))
        self.state = TrainState(
            self.model, optimizer, StepLR(optimizer, step_size=2, gamma=0.5), seed=3
        )
        average = AveragedModel(self.model)
        self.state.registered.add("average", average, lambda: average.update_parameters(self.model))
        self.log = Log()


class Pair:
    """A rank and a spare. The rank's steps go by random gradients."""

    def __init__(self, make: Optimized, device: str = "cpu") -> None:
        self.device = device
        self.rank, self.spare = Side(make, device), Side(make, device)
        self.reducer = GradientReducer(self.rank.model, max_world=2, entering=lambda _: None)
        self.feeds = Feeds(lag=LAG, write=self.rank.log.write)
        self.follower = Follower(
            self.spare.state,
            host="127.0.0.1",
            write=self.spare.log.write,
            changed=lambda: None,
        )

    def feed(self, **more: Any) -> None:
        self.feeds.told(Feed(spare="s4", address=self.follower.address, **more))

    def step(self, before: Callable[[], None] = lambda: None, skip: str = "") -> None:
        state = self.rank.state
        self.reducer.begin()
        torch.manual_seed(100 + state.step)
        for bucket in self.reducer._buckets:
            bucket.gradients.normal_()
        if skip:
            state.trained[skip].grad = None
        self.rank.model(torch.randn(5, 6).to(self.device))  # running statistics
        before()
        self.feeds.before(state, self.reducer)
        state.apply(0.5)
        state.step += 1
        state.last = [float(state.step), 0.5, 4.0, 1.0]
        self.feeds.after(state, self.reducer, 0.5)

    def step_until(self, kind: Kind, number: int = 1) -> dict[str, Any]:
        """Make steps until the spare, or the rank, has written so many events of a kind."""
        log = self.rank.log if kind is Kind.SPARE_DROPPED else self.spare.log
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            found = [data for one, data in log.events if one is kind]
            if len(found) >= number:
                return found[number - 1]
            self.step()
            self.feeds.check(self.rank.state.step, fingerprint(self.rank.state))
            with log.news:
                log.news.wait(0.02)
        raise AssertionError((self.rank.log.events, self.spare.log.events))

    def follows(self) -> None:
        """The spare, once it has caught up, makes one more step as the rank does. One that lags
        meanwhile, as on a busy machine, gets another copy.
        """
        for _ in range(MOST_STEPS):
            level = self.follower.step == self.rank.state.step
            self.step()
            with self.spare.log.news:
                self.spare.log.news.wait_for(lambda: self.follower.step == self.rank.state.step, 1)
            if level and self.follower.step == self.rank.state.step:
                break
        self.settle()
        self.same()

    def settle(self) -> None:
        self.follower.settle(self.rank.state.step, lambda: None)

    def same(self) -> None:
        mine, other = self.rank.state, self.spare.state
        assert self.follower.step == mine.step
        assert mine.digests() == other.digests()
        assert mine.scalars() == other.scalars()
        for name, tensor in mine.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name

    def close(self) -> None:
        self.feeds.close()
        if self.follower._thread.ident is not None:
            self.follower.close()


def adam(parameters: list[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=0.1)


def writes_into_gradients(parameters: list[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


@pytest.fixture(params=DEVICES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(adam, request.param)
    yield made
    made.close()


def test_a_spare_that_was_built_alike_follows_without_a_copy(pair: Pair) -> None:
    pair.follower.start()
    pair.feed()
    for _ in range(5):
        pair.step()
        until(lambda: pair.follower.step == pair.rank.state.step)  # so that it never lags
    pair.settle()
    pair.same()
    assert pair.spare.log.events == [
        (Kind.SPARE_SYNCED, {"step": 1, "how": "equal", "bytes": 0, "seconds": 0.0})
    ]


def test_a_spare_that_comes_late_gets_a_copy_once(pair: Pair) -> None:
    for _ in range(4):
        pair.step()
    pair.follower.start()
    pair.feed()
    assert pair.step_until(Kind.SPARE_SYNCED)["how"] == "copy"
    pair.follows()


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_that_writes_into_the_gradients_is_followed_all_the_same(device: str) -> None:
    pair = Pair(writes_into_gradients, device)
    try:
        pair.follower.start()
        pair.step()
        assert pair.feeds._copies
        pair.feed()
        assert pair.step_until(Kind.SPARE_SYNCED)["how"] == "copy"
        pair.follows()
    finally:
        pair.close()


def test_a_rate_set_by_hand_a_frozen_layer_and_a_parameter_without_gradient_are_followed(
    pair: Pair,
) -> None:
    pair.follower.start()
    pair.feed()
    pair.step()
    pair.spare.log.wait(Kind.SPARE_SYNCED)
    groups = pair.rank.state.optimizer.param_groups
    pair.step(lambda: groups[0].update(lr=0.7, betas=(0.5, 0.6)))
    pair.step(skip="0.weight")
    pair.settle()
    pair.same()


def test_gradients_are_kept_and_not_overwritten_by_the_next_step(pair: Pair) -> None:
    pair.step()
    held = pair.feeds.retained
    assert held is not None and held.step == 1
    kept = [part.gradients.clone() for part in held.buffers]
    held.use()
    pair.step()
    pair.step()
    for part, before in zip(held.buffers, kept, strict=True):
        assert torch.equal(part.gradients, before)
    held.release()
    assert held.buffers in [buffers for buffers, _ in pair.feeds._pool.free]


def test_a_rank_that_feeds_nobody_uses_two_sets_of_buffers_in_turn(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.feeds.prepare(pair.reducer)
    monkeypatch.setattr(Bucket, "allocate", lambda bucket: pytest.fail("one more was made"))
    used = []
    for _ in range(5):
        pair.step()
        assert pair.feeds.retained is not None
        used.append([id(part) for part in pair.feeds.retained.buffers])
    assert used == [used[0], used[1], used[0], used[1], used[0]] and used[0] != used[1]


def test_a_spare_that_does_nothing_is_dropped_and_the_job_does_not_wait(pair: Pair) -> None:
    pair.feed()  # it listens, and does not answer
    waited = []
    for _ in range(LAG + 2):
        pair.step()
        assert pair.feeds.retained is not None
        waited.append(pair.feeds.retained.buffers)
    said = pair.rank.log.wait(Kind.SPARE_DROPPED)
    assert (said["spare"], said["why"]) == ("s4", f"it lags by more than {LAG} steps")
    assert not pair.feeds._fed[0]._queue or len(pair.feeds._fed[0]._queue) == 1
    # What it did not take is free again, where no copies on the host waited for it instead.
    free = [buffers for buffers, _ in pair.feeds._pool.free]
    assert (free or pair.device != "cpu") and all(buffers in waited[:LAG] for buffers in free)


def test_a_spare_whose_state_differs_in_one_bit_is_found_and_gets_a_copy(pair: Pair) -> None:
    pair.follower.start()
    pair.feed()
    pair.step()
    pair.spare.log.wait(Kind.SPARE_SYNCED)
    with torch.no_grad():
        pair.spare.model[2].bias[1] += 2**-20
    assert pair.step_until(Kind.SPARE_DROPPED)["why"] == "its state differs"
    assert pair.step_until(Kind.SPARE_SYNCED, 2)["how"] == "copy"
    pair.follows()


def test_a_step_whose_gradients_are_missing_is_noticed(pair: Pair) -> None:
    pair.follower.start()
    pair.feed()
    pair.step()
    pair.spare.log.wait(Kind.SPARE_SYNCED)
    feed = pair.feeds._fed[0]
    offer = feed.offer

    def loses(item: Item, *, step: bool = False) -> bool:
        item.done()
        return True

    feed.offer = loses  # type: ignore[method-assign]
    pair.step()
    feed.offer = offer  # type: ignore[method-assign]
    assert pair.step_until(Kind.SPARE_DROPPED)["why"] == "its state differs"
    assert pair.step_until(Kind.SPARE_SYNCED, 2)["how"] == "copy"
    pair.settle()
    pair.same()


class Stuck(HostCopy):
    """Never there."""

    WHY = "a GPU has not copied to the host within 60 s"

    def wait(self, limit_s: float, check: Callable[[], None] = lambda: None) -> None:
        raise RuntimeError(self.WHY)


def test_a_copy_that_does_not_come_ends_the_feed_and_says_why(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.follower.start()
    pair.feed()
    pair.step()
    pair.spare.log.wait(Kind.SPARE_SYNCED)
    (fed,) = pair.feeds._fed
    monkeypatch.setattr(feeds, "HostCopy", Stuck)
    assert pair.step_until(Kind.SPARE_DROPPED)["why"] == Stuck.WHY
    assert not fed._queue and not pair.feeds._fed


def test_a_state_that_cannot_be_trusted_is_replaced_although_it_looks_the_same(pair: Pair) -> None:
    pair.follower.start()
    pair.feed(anew=True)
    assert pair.step_until(Kind.SPARE_SYNCED)["how"] == "copy"


def test_who_does_not_know_the_secret_is_refused(pair: Pair) -> None:
    pair.follower.start()
    host, port, token = pair.follower.address.split(" ")
    other = f"{host} {port} {'0' * len(token)}"
    pair.feeds.told(Feed(spare="s4", address=other))
    pair.step()
    assert "token" in pair.step_until(Kind.SPARE_DROPPED)["why"]
    assert pair.spare.state.step == 0 and pair.follower.step == -1


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1 x 00", "127.0.0.1 9 zz"])
def test_an_address_that_is_none_is_an_error(address: str) -> None:
    with pytest.raises(ValueError):
        frames.parse(address)
