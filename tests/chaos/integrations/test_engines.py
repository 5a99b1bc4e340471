"""DeepSpeed's engine and torchtitan's trainer: stand-ins with the methods that are wrapped; where
the frameworks are installed, these methods are compared with theirs.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.chaos.integrations.heard import Heard, need
from trainchaos.chaos.integrations import deepspeed, torchtitan

PASS = ["forward", "backward", "gradient"]


class Engine:
    """The part of ``deepspeed.DeepSpeedEngine`` that is used; two batches make a step."""

    def __init__(self, done: int) -> None:
        self.module = torch.nn.Linear(3, 1)
        self.global_steps, self.global_rank = done, 3
        self._batches = 0
        self.saved: list[str] = []

    def __call__(self, batch: torch.Tensor) -> Any:
        return self.module(batch)

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        self._batches += 1
        loss.backward()
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._batches % 2 == 0

    def step(self, lr_kwargs: Any = None) -> None:
        self.global_steps += self.is_gradient_accumulation_boundary()

    def save_checkpoint(self, save_dir: str, tag: Any = None) -> bool:
        self.saved.append(save_dir)
        return True


class Trainer:
    """The part of ``torchtitan.trainer.Trainer`` that is used."""

    def __init__(self, steps: int, loaded: int = 0) -> None:
        self.step = 0
        self.model_parts = [torch.nn.Linear(3, 1)]
        self.gradient_accumulation_steps = 2
        training = SimpleNamespace(steps=steps, local_batch_size=4)
        self.config = SimpleNamespace(training=training)
        self.metrics_processor = SimpleNamespace(log=lambda step, loss, *_, **__: None)
        self.optimizers = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        self.checkpointer: Any = Checkpointer()
        self.validator = SimpleNamespace(validate=lambda parts, step: None)
        self._loaded = loaded

    def forward_backward_step(self, *, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model_parts[0](batch).square().mean()
        loss.backward()
        return loss

    def train_step(self, data: Iterator[torch.Tensor]) -> None:
        batches = [next(data) for _ in range(self.gradient_accumulation_steps)]
        loss = sum(float(self.forward_backward_step(batch=batch).detach()) for batch in batches)
        self.optimizers.step()
        self.metrics_processor.log(self.step, loss, loss, 1.0)

    def train(self) -> None:
        self.step = self._loaded
        data = iter(lambda: torch.ones(4, 3), None)
        while self.step < self.config.training.steps:
            self.step += 1
            self.train_step(data)
            self.checkpointer.save(self.step, last_step=self.step == self.config.training.steps)
            self.validator.validate(self.model_parts, self.step)


class Checkpointer:
    """Saves the last step only."""

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return last_step

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return last_step


def test_an_engine_reports_a_step_of_several_batches(heard: Heard) -> None:
    engine = Engine(done=7)
    deepspeed.watch(engine)
    losses = []
    for _ in range(2):
        loss = engine(torch.ones(4, 3)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.save_checkpoint("here") and engine.saved == ["here"]
    step, *rest = heard.reports()
    assert (step.step, step.rank, step.samples) == (8, 3, 8)
    assert step.loss == pytest.approx(sum(losses) / 2)
    assert [one.what for one in rest] == ["checkpoint", "-"]
    assert heard.points == [
        *[(name, 8) for name in [*PASS, "forward", "backward", "optimizer"]],
        ("saving", 8),
    ]


def test_gradients_of_an_engine_are_nan_where_a_fault_says_so(heard: Heard) -> None:
    heard.orders["gradient", 1] = "nan"
    engine = Engine(done=0)
    deepspeed.watch(engine)
    engine.backward(engine(torch.ones(4, 3)).sum())
    assert all(p.grad is not None and p.grad.isnan().all() for p in engine.module.parameters())
    assert [(what, step) for what, step, _, _ in heard.confirmed] == [("nan", 1)]


def test_a_trainer_reports_its_steps_and_points(heard: Heard) -> None:
    trainer = Trainer(steps=12, loaded=10)
    torchtitan.watch(trainer)
    trainer.train()
    assert heard.order() == ["11", "evaluation", "-", "12", "checkpoint", "-", "evaluation", "-"]
    assert [one.samples for one in heard.reports() if one.busy_s is None] == [8, 8]
    assert all(loss is not None for loss in heard.losses())
    step = ["data", *["forward", "backward"] * 2, "gradient", "optimizer"]
    assert [name for name, number in heard.points if number == 11] == step
    assert heard.points[-1] == ("saving", 12)


def test_gradients_of_shards_are_filled(heard: Heard) -> None:
    heard.orders["gradient", 1] = "nan"
    trainer = Trainer(steps=1)
    torchtitan.watch(trainer)
    trainer.train()
    assert all(bool(p.isnan().all()) for p in trainer.model_parts[0].parameters())


def parameters(module: str, owner: str, method: str) -> list[str]:
    """The parameters of a method, read from its source: to import it may need a GPU."""
    spec = importlib.util.find_spec(module.split(".")[0])
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    (found,) = [
        each
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name == owner
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name == method
    ]
    return [each.arg for each in (*found.args.args, *found.args.kwonlyargs)]


def takes(stand_in: type, method: str, real: list[str]) -> bool:
    """Whether a method of the stand-in takes the first parameters of the real one."""
    ours = list(inspect.signature(getattr(stand_in, method)).parameters)
    return real[: len(ours)] == ours


@pytest.mark.parametrize(
    "method", ["backward", "step", "is_gradient_accumulation_boundary", "save_checkpoint"]
)
def test_deepspeed_has_what_is_wrapped(method: str) -> None:
    need("deepspeed")
    real = parameters("deepspeed.runtime.engine", "DeepSpeedEngine", method)
    assert takes(Engine, method, real), real


@pytest.mark.parametrize("method", ["_should_save", "save"])
def test_torchtitan_saves_as_the_stand_in(method: str) -> None:
    need("torchtitan")
    module, owner = {
        "_should_save": ("torchtitan.components.checkpointer.dcp", "CheckpointManager"),
        "save": ("torchtitan.components.checkpointer.base", "BaseCheckpointManager"),
    }[method]
    assert takes(Checkpointer, method, parameters(module, owner, method))


def test_torchtitan_has_what_is_wrapped() -> None:
    need("torchtitan")
    trainer, metrics = "torchtitan.trainer", "torchtitan.components.metrics"
    assert parameters(trainer, "Trainer", "train") == ["self"]
    assert len(parameters(trainer, "Trainer", "train_step")) == 2
    passes = parameters(trainer, "Trainer", "forward_backward_step")
    assert passes == ["self", "input_dict", "labels", "global_valid_tokens"]
    logged = parameters(metrics, "MetricsProcessor", "log")
    assert logged[:3] == ["self", "step", "global_avg_loss"]
