"""The training state: complete, exact, and nothing changed by looking at it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.state import TrainState

Make = Callable[[nn.Module], tuple[Optimizer, LRScheduler | None]]


def net(seed: int = 0) -> nn.Module:
    """Something with buffers, several parameters, and dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1)
    )


def adamw(model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 1))


def momentum(model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None


def plain(model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
    return torch.optim.SGD(model.parameters(), lr=0.1), None


EVERY: list[Make] = [adamw, momentum, plain]


def state_of(make: Make, *, seed: int = 0, model_seed: int = 0) -> TrainState:
    model = net(model_seed)
    return TrainState(model, *make(model), seed=seed)


def gradients(model: nn.Module, step: int) -> None:
    """Gradients that depend on the step and the parameters."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=generator)
    model.zero_grad()
    model.eval()(x).square().mean().backward()


def train(state: TrainState, steps: int) -> TrainState:
    """Steps as the job applies them."""
    for step in range(state.step + 1, state.step + steps + 1):
        gradients(state.model, step)
        state.apply(0.0)
        state.step = step
    return state


def values(state: TrainState) -> dict[str, bytes]:
    return {name: bytes(bytes_of(tensor)) for name, tensor in state.tensors().items()}


@pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)
def test_taking_hold_of_training_changes_nothing(make: Make) -> None:
    """Against the bare loop: the same parameters bit for bit, whatever the optimizer keeps."""
    bare = net()
    optimizer, scheduler = make(bare)
    for step in range(1, 6):
        gradients(bare, step)
        optimizer.step()
        if scheduler:
            scheduler.step()
    held = train(state_of(make), 5)
    for (name, mine), theirs in zip(held.model.named_parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    assert held.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def copy(source: TrainState, target: TrainState) -> None:
    """What transfer and restore do: tensors in place, scalars through JSON."""
    scalars = json.loads(json.dumps(source.scalars(), allow_nan=False))
    slots = target.planned(scalars)
    with torch.no_grad():
        for name, tensor in target.tensors(slots).items():
            tensor.copy_(source.tensors()[name])
    target.load_scalars(scalars, slots)


@pytest.mark.parametrize("make", EVERY, ids=lambda make: make.__name__)
@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_copied_state_goes_on_exactly_like_the_original(make: Make, at: int) -> None:
    original = train(state_of(make), at)
    copied = train(state_of(make, model_seed=1), 2)
    copy(original, copied)
    assert copied.step == at
    assert values(copied) == values(original)
    assert copied.digests() == original.digests()
    assert values(train(copied, 3)) == values(train(original, 3))
    assert copied.scalars() == original.scalars()
    assert copied.digests() == original.digests()


def test_every_part_of_the_state_has_its_own_digest() -> None:
    state = train(state_of(adamw), 2)
    before = state.digests()
    with torch.no_grad():
        next(iter(state.model.parameters())).view(-1)[0] += 1e-6
    assert changed(before, state) == {"parameters"}
    before = state.digests()
    slots = next(iter(state.optimizer.state.values()))
    slots["exp_avg"].view(-1)[0] += 1e-6
    assert changed(before, state) == {"optimizer"}
    before = state.digests()
    state.optimizer.param_groups[0]["lr"] *= 2
    assert changed(before, state) == {"scheduler"}
    before = state.digests()
    state.step += 1
    assert changed(before, state) == {"rng"}


def changed(before: dict[str, str], state: TrainState) -> set[str]:
    after = state.digests()
    return {name for name in before if before[name] != after[name]}


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_random_generators_are_a_function_of_seed_rank_and_step() -> None:
    def drawn(seed: int, rank: int, step: int) -> tuple[float, float, float]:
        state_of(plain, seed=seed).seed_step(rank, step)
        return draws()

    first = drawn(1, 2, 3)
    draws()
    assert drawn(1, 2, 3) == first
    others = [drawn(2, 2, 3), drawn(1, 3, 3), drawn(1, 2, 4), drawn(1, 3, 2)]
    for generator in range(3):
        assert len({one[generator] for one in [first, *others]}) == 5


def test_a_state_of_another_job_is_refused() -> None:
    mine, other = state_of(adamw, seed=1), state_of(adamw, seed=2)
    with pytest.raises(ValueError, match="state of seed 2 offered to a job of seed 1"):
        mine.load_scalars(other.scalars())
