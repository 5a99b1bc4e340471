"""A step that is done again begins with the bits with which the lost attempt began, whatever the
model and the script change in it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from tests.support.zoo import MEMBERS, WIDTH, Zoo
from trainchaos.recovery.state import state as states
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.state.state import TrainState

STEPS = 7


class Training:
    """A model of the zoo without a job."""

    def __init__(self, *names: str) -> None:
        torch.manual_seed(3)
        self.model = Zoo([*names])
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state = TrainState(self.model, optimizer, None, seed=5)
        for name, (thing, update) in self.model.registered().items():
            self.state.registered.add(name, thing, update)

    def attempted(self, number: int) -> float:
        """The passes of a step."""
        self.state.seed_step(0, number)
        self.state.attempt.begin()
        self.state.optimizer.zero_grad()
        loss = self.model(torch.randn(4, WIDTH))
        loss.backward()
        return float(loss)

    def run(self, lost: set[int], times: int = 1) -> dict[str, Any]:
        """All that there is after the last step. ``lost``: steps whose attempts are lost first, so
        many ``times``.
        """
        for number in range(1, STEPS + 1):
            for _ in range(times if number in lost else 0):
                self.attempted(number)
                assert self.state.attempt.whole()
                self.state.attempt.undo()
            loss = self.attempted(number)
            self.state.attempt.applied()
            self.state.apply(loss)
            self.state.step = number
        return self.everything()

    def everything(self) -> dict[str, Any]:
        """State, buffers that are not part of it, and the output in evaluation."""
        found: dict[str, Any] = {
            name: bytes(bytes_of(tensor))
            for name, tensor in (self.state.tensors() | dict(self.model.named_buffers())).items()
        }
        self.state.seed_step(0, 0)
        self.model.eval()
        found["output"] = float(self.model(torch.ones(4, WIDTH)))
        self.model.train()
        return found | self.state.scalars()


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("lost", [{1}, {2, 3, 6}, {1, 2, 3, 4, 5, 6, 7}], ids=str)
def test_an_attempt_that_is_lost_leaves_nothing(name: str, lost: set[int]) -> None:
    """Killed peers, hangs and values that are not finite all end an attempt so."""
    if name == "Big" and lost != {1}:
        lost = lost - {3}  # the first one to change a large buffer; see below
    assert Training(name).run(lost, times=2) == Training(name).run(set())


def test_what_one_attempt_leaves_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without putting back, nearly all of them differ: the test above has teeth."""
    monkeypatch.setattr(states.Attempt, "undo", lambda self: None)
    same = {name for name in MEMBERS if Training(name).run({2, 6}) == Training(name).run(set())}
    assert same == {
        "Plain",
        "Drops",
        "WeightNorm",
        "Tied",
        "Checkpointed",
        "Frozen",
        "Averaged",
        "Clamped",
    }


def copied(training: Training) -> int:
    """Bytes that the attempt under way has copied."""
    return sum(tensor.nbytes for tensor, _ in training.state.attempt._copies._places)


def test_what_does_not_change_is_not_copied_again() -> None:
    training, found = Training("Big", "BatchNorm"), []
    for number in range(1, 8):
        training.attempted(number)
        found.append(copied(training))
        training.state.attempt.applied()
        training.state.apply(0.0)
    large = 4 << 15
    weights = sum(p.nbytes for p in training.model.parameters())
    small = found[2] - large
    # in the first two attempts all; then the one that always changes, and from the third one on,
    # which changed it, the late one
    assert found == [3 * large + small + weights] * 2 + [large + small] + [2 * large + small] * 4
    assert small < 1000


def test_the_first_change_of_a_large_tensor_is_known_to_be_beyond_undoing() -> None:
    training = Training("Big")
    for number in (1, 2):
        training.attempted(number)
        training.state.attempt.applied()
    training.attempted(3)
    assert not training.state.attempt.whole()
    training.state.attempt.undo()
    training.attempted(3)
    assert training.state.attempt.whole(), "it is copied from now on"


@pytest.mark.parametrize("through_data", [False, True])
def test_what_is_beyond_the_copies_is_seen_to_change(
    through_data: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEARNED_BYTES", 0)
    training = Training("Momentum")
    training.attempted(1)
    with torch.no_grad():
        weight = training.model.members["Momentum"].outer.weight
        (weight.data if through_data else weight).mul_(2)
    assert not training.state.attempt.whole()


def test_a_buffer_that_becomes_nan_is_found_and_what_was_infinite_is_not() -> None:
    training = Training("BatchNorm", "Odd", "Reassigned")
    norm = training.model.members["BatchNorm"].norm
    reassigned = training.model.members["Reassigned"]
    for spoil in (
        lambda: norm.running_mean.fill_(torch.nan),
        lambda: norm.running_var[0].fill_(torch.inf),
        lambda: setattr(reassigned, "mean", reassigned.mean * torch.nan),
    ):
        training.attempted(1)
        assert training.state.attempt.spoilt() == 0
        spoil()
        assert training.state.attempt.spoilt() != training.state.attempt.spoilt(), "NaN"
        training.state.attempt.undo()
        assert norm.running_mean.isfinite().all() and reassigned.mean.isfinite().all()


def test_what_the_loop_sets_itself_is_put_back() -> None:
    training = Training("Plain")
    state = training.state
    group = state.optimizer.param_groups[0]
    training.attempted(1)
    group["lr"] *= 0.5
    group["mine"] = 1
    first = next(training.model.parameters()).requires_grad_(False)
    state.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    state.attempt.undo()
    assert (group["lr"], "mine" in group, first.requires_grad) == (0.01, False, True)
    assert len(state.optimizer.param_groups) == 1


def test_a_step_that_was_applied_is_not_undone() -> None:
    training = Training("BatchNorm")
    norm = training.model.members["BatchNorm"].norm
    training.attempted(1)
    training.state.attempt.applied()
    training.state.attempt.undo()
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("size", [4, 1 << 15])
def test_a_buffer_made_in_inference_mode_is_left_alone(size: int) -> None:
    model = torch.nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("cache", torch.ones(size))
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1), None, seed=1)
    for _ in range(4):
        state.attempt.begin()
        assert state.attempt.whole()
        state.attempt.undo()
    assert torch.equal(model.cache, torch.ones(size))


def test_a_buffer_that_is_spread_over_ranks_is_put_back() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.BatchNorm1d(2)
        distribute_module(model, init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        state = TrainState(model, optimizer, None, seed=1)
        assert model.running_mean is not None
        for _ in range(2):
            state.attempt.begin()
            model.running_mean.add_(math.nan)
            assert math.isnan(state.attempt.spoilt())
            state.attempt.undo()
            assert torch.equal(local(model.running_mean), torch.zeros(2))
    finally:
        dist.destroy_process_group()
