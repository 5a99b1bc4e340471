"""Every optimizer and every scheduler of torch: what a spare or a checkpoint gets is the whole
state, bit for bit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

from trainchaos.recovery.checkpoint import restore as restoring
from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.restore import CheckpointMismatch
from trainchaos.recovery.collectives.group import Circle
from trainchaos.recovery.collectives.transfer import copy_state
from trainchaos.recovery.state.digest import bytes_of
from trainchaos.recovery.state.optimizer_state import COMPUTED_HOW
from trainchaos.recovery.state.registered import LoadError
from trainchaos.recovery.state.state import TrainState

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "ASGD": partial(optim.ASGD, lr=0.1, t0=2),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "Adafactor": partial(optim.Adafactor, lr=0.1),
    "Adagrad": partial(optim.Adagrad, lr=0.1, lr_decay=0.1),
    "Adam": partial(optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(optim.AdamW, lr=0.1),
    "Adamax": partial(optim.Adamax, lr=0.1),
    "Muon": partial(optim.Muon, lr=0.1),
    "NAdam": partial(optim.NAdam, lr=0.1),
    "RAdam": partial(optim.RAdam, lr=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9),
}
REFUSED = {"LBFGS": optim.LBFGS, "SparseAdam": optim.SparseAdam}


class Halving:
    """A rule for LambdaLR that is an object with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0 / (1 + self.calls)


def in_turn(optimizer: Optimizer) -> LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, total_iters=2)
    return lr_scheduler.SequentialLR(
        optimizer, [first, lr_scheduler.MultiStepLR(optimizer, [1, 2, 4])], milestones=[2]
    )


def chained(optimizer: Optimizer) -> LRScheduler:
    one, other = (
        lr_scheduler.ConstantLR(optimizer, total_iters=3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    return lr_scheduler.ChainedScheduler([one, other])


SCHEDULERS: dict[str, MakeScheduler] = {
    "ChainedScheduler": chained,
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=4),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=6),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=2),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Halving()),
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=5),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[2, 3, 3, 5]),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, lambda epoch: 0.95
    ),
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=12),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=6),
    "ReduceLROnPlateau": partial(lr_scheduler.ReduceLROnPlateau, patience=0, threshold=0.5),
    "SequentialLR": in_turn,
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "SWALR": partial(SWALR, swa_lr=0.5, anneal_epochs=4),
}
PAIRS = [
    *(
        (name, "OneCycleLR" if name in ("SGD", "AdamW", "Adam", "NAdam", "RAdam") else "StepLR")
        for name in OPTIMIZERS
    ),
    *(("AdamW", name) for name in SCHEDULERS),
    *(("SGD", name) for name in SCHEDULERS),
]


def make(optimizer: str, scheduler: str | None = None, *, seed: int = 0) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2, bias=False))
    made = OPTIMIZERS[optimizer](list(model.parameters()))
    return TrainState(model, made, SCHEDULERS[scheduler](made) if scheduler else None, seed=1)


def train(state: TrainState, steps: int) -> TrainState:
    """As the job does: gradients are a function of the step and the parameters, and there is always
    one.
    """
    for step in range(state.step + 1, state.step + steps + 1):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        loss = state.model(x).square().mean()
        for parameter, gradient in zip(
            state.model.parameters(),
            torch.autograd.grad(loss, list(state.model.parameters())),
            strict=True,
        ):
            parameter.grad = gradient
        state.apply(float(loss.detach()))
        state.step = step
    return state


def everything(state: TrainState) -> dict[str, Any]:
    """The state, and what torch itself says it is."""
    values: dict[str, Any] = {
        name: bytes(bytes_of(tensor)) for name, tensor in state.tensors().items()
    }
    packed = state.optimizer.state_dict()
    values["groups"] = [
        {k: v for k, v in g.items() if k not in COMPUTED_HOW} for g in packed["param_groups"]
    ]
    values["slots"] = {
        key: {
            slot: (type(v), bytes(bytes_of(v)) if isinstance(v, Tensor) else v)
            for slot, v in slots.items()
        }
        for key, slots in packed["state"].items()
    }
    scheduler = state.scheduler
    values["scheduler"] = in_order(scheduler.state_dict()) if scheduler else ""
    return values


def in_order(value: Any) -> str:
    """Equal for equal values; a dictionary's order is none of its value."""
    if isinstance(value, dict):
        return repr(sorted((str(key), in_order(item)) for key, item in value.items()))
    return (
        f"{type(value)}"
        f" {[in_order(v) for v in value] if isinstance(value, list | tuple) else value!r}"
    )


class Relay(Circle):
    """A group of two that live one after the other: what the source broadcasts, the other gets
    afterwards.
    """

    def __init__(self, sent: list[Tensor], rank: int, backend: str = "gloo") -> None:
        self.rank, self.backend, self.ranks = rank, backend, (0, 1)
        self.sent = sent

    def start_broadcast(self, tensor: Tensor, source: int) -> None:
        if self.rank == source:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.pop(0))

    def settle(self) -> None:
        pass


def copied(source: TrainState, target: TrainState) -> TrainState:
    """As a peer gets it."""
    sent: list[Tensor] = []
    copy_state(source, Relay(sent, 0), source=0, receive=False, progress=lambda: None)
    copy_state(target, Relay(sent, 1), source=0, receive=True, progress=lambda: None)
    assert not sent
    return target


def restored(source: TrainState, target: TrainState, directory: Path) -> TrainState:
    """As a checkpoint on disk gives it."""
    saves.save(source, directory, generation=1)
    assert (
        restoring.restore_newest(target, directory, lambda bad, why: pytest.fail(why)) is not None
    )
    return target


def classes(module: Any, base: type) -> Iterator[str]:
    for name, value in vars(module).items():
        if (
            inspect.isclass(value)
            and issubclass(value, base)
            and value is not base
            and name[0] != "_"
        ):
            yield name


def test_the_tables_have_every_optimizer_and_scheduler_of_torch() -> None:
    assert set(classes(optim, Optimizer)) == {*OPTIMIZERS, *REFUSED}
    assert set(classes(lr_scheduler, LRScheduler)) == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_a_refilled_rank_goes_on_as_if_nothing_had_happened(optimizer: str, scheduler: str) -> None:
    """Into a process that never trained, and into one that went astray."""
    for at in (0, 1, 5):
        original = train(make(optimizer, scheduler), at)
        fresh = copied(original, make(optimizer, scheduler, seed=1))
        astray = copied(original, train(make(optimizer, scheduler, seed=2), 3))
        there = everything(original)
        assert everything(fresh) == everything(astray) == there
        goal = everything(train(original, 4))
        assert everything(train(fresh, 4)) == goal
        assert everything(train(astray, 4)) == goal
        assert fresh.digests() == astray.digests() == original.digests()


@pytest.mark.parametrize(("optimizer", "scheduler"), PAIRS)
def test_a_restored_checkpoint_goes_on_as_if_nothing_had_happened(
    optimizer: str, scheduler: str, tmp_path: Path
) -> None:
    original = train(make(optimizer, scheduler), 5)
    again = restored(original, make(optimizer, scheduler, seed=1), tmp_path)
    assert everything(again) == everything(original)
    assert everything(train(again, 4)) == everything(train(original, 4))


def test_a_checkpoint_of_before_all_of_the_optimizer_was_saved_is_read(tmp_path: Path) -> None:
    """It has learning rates and tensors alone; another optimizer is told by its slots."""
    original = train(make("AdamW", "StepLR"), 3)
    content = saves.content_of(original)
    old = dict(content.scalars)
    del old["optimizer"], old["frozen"]
    old["lr"] = [group["lr"] for group in original.optimizer.param_groups]
    order = saves.SaveOrder(directory=tmp_path, generation=1)
    saves.write(order, replace(content, scalars=old))
    again = make("AdamW", "StepLR", seed=1)
    assert restoring.restore_newest(again, tmp_path, lambda bad, why: pytest.fail(why))
    assert everything(train(again, 4)) == everything(train(original, 4))
    with pytest.raises(
        CheckpointMismatch, match=r"optimizer\.0\.weight\.exp_avg is only in the checkpoint"
    ):
        restoring.restore_newest(make("SGD", "StepLR"), tmp_path, lambda bad, why: pytest.fail(why))


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_be_used_is_refused_before_anything_is_trained(name: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(
        TypeError, match=f"{name} cannot be used: its step is made without a closure"
    ):
        TrainState(model, REFUSED[name](list(model.parameters())), None, seed=1)


def test_an_optimizer_that_works_on_lists_is_told_of_where_some_parameters_are_parts() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        plan = {"0": ColwiseParallel(use_local_output=False)}
        parallelize_module(model, dist.init_device_mesh("cpu", (1,)), plan)
        as_on_a_gpu = optim.AdamW(model.parameters(), foreach=True)
        with pytest.raises(TypeError, match=r"AdamW cannot .*: make it with foreach=False"):
            TrainState(model, as_on_a_gpu, None, seed=1)
        TrainState(model, optim.AdamW(model.parameters(), foreach=False), None, seed=1)
    finally:
        dist.destroy_process_group()


class Counting(optim.SGD):
    """Counts in a plain number, remembers in a list, changes a field of its groups, and makes a
    slot late.
    """

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["seen"] = (group.get("seen", (0, 0.0))[0] + 1, math.inf)
            for p in group["params"]:
                slots = self.state[p]
                slots["step"] = slots.get("step", 0) + 1
                slots.setdefault("past", []).append(p.detach().clone())
                del slots["past"][:-2]
                if slots["step"] == 4:
                    slots["late"] = {"mean": p.detach().double()}
                with torch.no_grad():
                    p.add_(slots["past"][0], alpha=0.01 * slots["step"])


def counting(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return TrainState(model, Counting(model.parameters(), lr=0.1, momentum=0.5), None, seed=1)


def steps(state: TrainState, number: int) -> TrainState:
    for _ in range(number):
        for parameter in state.model.parameters():
            parameter.grad = parameter.detach().cos()
        state.apply(0.0)
        state.step += 1
    return state


def test_whatever_an_optimizer_keeps_is_state(tmp_path: Path) -> None:
    """A plain number as step, lists, slots that come late, fields that change."""
    for at in (1, 5):
        original = steps(counting(0), at)
        peers = [copied(original, counting(1)), copied(original, steps(counting(2), 7 - at))]
        peers.append(restored(original, counting(3), tmp_path / str(at)))
        goal = steps(original, 4).optimizer.state_dict()
        for peer in peers:
            assert in_order(steps(peer, 4).optimizer.state_dict()) == in_order(goal)
            assert peer.optimizer_step() == at + 4


def test_what_is_planted_in_the_state_cannot_vanish() -> None:
    """Before its first step an optimizer keeps nothing, and there is nothing to plant; afterwards
    all of it is used.
    """
    state = make("SGD", "OneCycleLR")
    assert not [name for name in state.tensors() if name.startswith("optimizer.")]
    train(state, 1)
    planted = state.tensors()["optimizer.0.weight.momentum_buffer"]
    planted.view(-1)[0] = math.nan
    assert state.not_finite() == "optimizer.0.weight.momentum_buffer"
    planted.view(-1)[0] = 0.0
    state.model.register_buffer("mask", torch.tensor([-math.inf]))  # as a model may rightly have
    assert state.not_finite() is None
    planted.view(-1)[0] = math.nan
    train(state, 1)
    assert torch.isnan(state.trained["0.weight"].detach().view(-1)[0])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_a_commit_says_of_any_scheduler(scheduler: str) -> None:
    state = train(make("SGD", scheduler), 2)
    assert state.scheduler_step() in (2, None)
    assert state.optimizer_step() is None


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place() -> None:
    """Compiled code and captured graphs refer to the tensor itself."""

    def tensor_rate(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        made = optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=(0.8, 0.9))
        return TrainState(model, made, lr_scheduler.ExponentialLR(made, 0.5), seed=1)

    def steps(state: TrainState) -> TrainState:
        for parameter in state.model.parameters():
            parameter.grad = parameter.detach().cos()
        state.apply(0.0)
        return state

    original, other = steps(tensor_rate(0)), tensor_rate(1)
    rate = other.optimizer.param_groups[0]["lr"]
    copied(original, other)
    assert other.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)
    assert everything(steps(other)) == everything(steps(original))


def test_groups_that_came_later_and_slots_of_an_optimizer_loaded_before_are_state() -> None:
    def partly(seed: int) -> TrainState:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        return TrainState(model, optim.AdamW(model[0].parameters(), lr=0.1), None, seed=1)

    def step(state: TrainState) -> TrainState:
        for parameter in state.model.parameters():
            parameter.grad = parameter.detach().cos()
        state.apply(0.0)
        return state

    original = step(partly(0))
    original.optimizer.add_param_group({"params": original.model[1].parameters(), "lr": 0.01})  # type: ignore[index]
    step(original)
    other = copied(original, partly(1))
    assert everything(step(other)) == everything(step(original))

    trained = optim.AdamW(original.model.parameters(), lr=0.1)
    trained.load_state_dict(optim.AdamW(original.model.parameters(), lr=0.1).state_dict())
    step(TrainState(original.model, trained, None, seed=1))
    assert TrainState(original.model, trained, None, seed=1).optimizer_step() == 1, "taken as it is"


def test_what_could_not_be_saved_is_refused_when_it_is_attached() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(TypeError, match="trains a tensor that is no parameter of the model"):
        TrainState(
            model, optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), None, seed=1
        )
    odd = optim.SGD(model.parameters(), lr=0.1)
    odd.param_groups[0]["friend"] = iter(())
    with pytest.raises(
        TypeError,
        match=r"param_groups\.0\.friend is a tuple_iterator, which can be neither saved nor",
    ):
        TrainState(model, odd, None, seed=1)


def test_nothing_of_the_host_goes_over_a_group_that_takes_the_device_alone() -> None:
    """Adam counts its steps in the host's memory, of which NCCL takes nothing."""
    original = train(make("Adam"), 2)
    meta: list[torch.device] = []

    class Refusing(Relay):
        def start_broadcast(self, tensor: Tensor, source: int) -> None:
            meta.append(tensor.device)
            super().start_broadcast(tensor, source)

    copy_state(
        original,
        Refusing([], 0, "nccl"),
        source=0,
        receive=False,
        progress=lambda: None,
        device="meta",
    )
    assert {device.type for device in meta} == {"meta"}


def grown(groups: int, *, attached: int = 1) -> TrainState:
    """A state whose loop has added parameter groups since it was attached."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    parts = [
        {"params": [*layer.parameters()], "lr": 0.1 / (n + 1)} for n, layer in enumerate(model)
    ]
    optimizer = torch.optim.AdamW(parts[:attached])
    state = TrainState(model, optimizer, None, seed=5)
    for part in parts[attached:groups]:
        optimizer.add_param_group(part)
    model(torch.ones(1, 2)).sum().backward()
    state.apply(0.0)
    state.step = groups
    return state


@pytest.mark.parametrize(("saved", "here"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_groups_that_the_loop_adds_come_and_go_with_the_checkpoint(
    saved: int, here: int, tmp_path: Path
) -> None:
    there, state = grown(saved), grown(here)
    saves.save(there, tmp_path, generation=1)
    assert restoring.restore_newest(state, tmp_path, lambda bad, why: pytest.fail(why))
    assert state.scalars()["optimizer"] == there.scalars()["optimizer"]
    assert [len(group["params"]) for group in state.optimizer.param_groups] == [2] * saved


def test_a_checkpoint_of_fewer_groups_than_were_attached_is_of_another_job(tmp_path: Path) -> None:
    saves.save(grown(1), tmp_path, generation=1)
    with pytest.raises(CheckpointMismatch, match="parameter groups is 1 there, 2 here"):
        restoring.restore_newest(grown(2, attached=2), tmp_path, lambda bad, why: pytest.fail(why))


class Decays(torch.optim.Optimizer):
    """Its decay does not go by the learning rate, it draws noise, and it has no learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None, "k": torch.zeros(())})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """By hand."""
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] += 1
                for parameter in group["params"]:
                    self.state[parameter]["noise"] = torch.randn_like(parameter)
                    parameter.mul_(0.99).add_(parameter.grad, alpha=-0.1)


class CountsItself(Decays):
    n = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """In an attribute."""
        self.n += 1
        super().step()


class Wraps(Decays):
    def __init__(self, parameters: Any) -> None:
        parameters = [*parameters]
        super().__init__(parameters)
        self.base = torch.optim.Adam(parameters)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of the other one."""
        self.base.step()
        super().step()


def test_attach_changes_nothing_whatever_the_optimizer_does() -> None:
    model = nn.Linear(2, 2)
    optimizer = Decays(model.parameters())
    counter = optimizer.param_groups[0]["k"]
    before = [parameter.clone() for parameter in model.parameters()]
    generator = torch.get_rng_state()
    TrainState(model, optimizer, None, seed=5)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(generator, torch.get_rng_state())
    assert optimizer.param_groups[0]["k"] is counter and float(counter) == 0
    assert not optimizer.state and optimizer.param_groups[0]["lr"] is None


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (CountsItself, "CountsItself keeps n in an attribute"),
        (Wraps, "Wraps keeps another optimizer"),
    ],
)
def test_an_optimizer_whose_state_would_not_be_saved_is_refused(
    kind: type[Decays], complaint: str
) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=complaint):
        TrainState(model, kind(model.parameters()), None, seed=5)


class Adds:
    """Megatron's scheduler: a load adds to what is there."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num = optimizer, 0

    def step(self, by: int = 1) -> None:
        """Count, and set the rate."""
        self.num += by
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.num)

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Not in its place."""
        self.step(state["num"])


@pytest.mark.parametrize("makes", [False, True])
def test_a_scheduler_whose_load_adds_is_named_or_made_anew(makes: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainState(model, optimizer, Adds if makes else Adds(optimizer), seed=5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.apply(0.0)
    scalars = state.scalars()
    state.apply(0.0)
    if not makes:
        with pytest.raises(LoadError, match=r"num is 3 in place of 1.* a function that makes"):
            state.load_scalars(scalars)
        return
    state.load_scalars(scalars)
    assert state.scalars() == scalars and optimizer.param_groups[0]["lr"] == 0.05


def test_what_is_no_scheduler_is_called_that() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="int is no scheduler"):
        TrainState(model, optimizer, 3, seed=5)  # type: ignore[arg-type]
