"""A plain PyTorch loop, watched by its hooks."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.chaos.integrations.heard import Heard, listening
from trainchaos import beacon
from trainchaos.chaos.integrations.plain import Watched, watch

STEP = [("forward", 1), ("backward", 1), ("gradient", 1), ("optimizer", 1)]


class Loop:
    """A small model that is trained on batches of 4."""

    def __init__(self, done: int = 0) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.watched: Watched = watch(self.model, self.optimizer, done=done)

    def train(self, steps: int, *, summed: int = 1) -> list[float]:
        """The losses of all batches."""
        losses = []
        for number, batch in enumerate(self.watched.batches([torch.ones(4, 3)] * steps * summed)):
            loss = self.model(batch).square().mean()
            loss.backward()
            self.watched.loss(loss)
            losses.append(loss.item())
            if number % summed == summed - 1:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses


def test_each_step_is_reported_with_its_loss_and_samples(heard: Heard) -> None:
    losses = Loop(done=20).train(3)
    assert heard.steps() == [21, 22, 23] and heard.losses() == pytest.approx(losses)
    assert {one.samples for one in heard.reports()} == {4}


def test_the_points_of_a_step_come_in_their_order(heard: Heard) -> None:
    Loop().train(1)
    assert heard.points == [("data", 1), *STEP, ("data", 2)]


def test_batches_that_are_summed_up_are_one_step(heard: Heard) -> None:
    losses = Loop().train(2, summed=2)
    assert heard.steps() == [1, 2]
    assert heard.losses() == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert [one.samples for one in heard.reports()] == [8, 8]
    # its gradients are asked for once: NaN in one batch is in the sum
    names = [name for name, step in heard.points if step == 1 and name != "data"]
    assert names == ["forward", "backward", "gradient", "forward", "backward", "optimizer"]


def test_gradients_are_nan_where_a_fault_says_so_and_it_is_confirmed(heard: Heard) -> None:
    heard.orders["gradient", 2] = "nan"
    loop = Loop()
    loop.train(1)
    assert all(bool(p.isfinite().all()) for p in loop.model.parameters())
    loop.train(1)
    assert all(bool(p.isnan().all()) for p in loop.model.parameters())
    ((what, step, before, after),) = heard.confirmed
    assert (what, step) == ("nan", 2) and after is not None and math.isnan(after)
    assert before is not None and math.isfinite(before)


def test_gradients_that_no_hook_sees_are_filled_before_the_optimizer(heard: Heard) -> None:
    heard.orders["gradient", 1] = "nan"
    loop = Loop()
    for parameter in loop.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    loop.optimizer.step()
    assert heard.points == [("gradient", 1), ("optimizer", 1)]
    assert all(bool(p.isnan().all()) for p in loop.model.parameters())
    assert [(what, step) for what, step, _, _ in heard.confirmed] == [("nan", 1)]


def test_an_exception_at_a_point_comes_out_of_the_backward_pass(heard: Heard) -> None:
    heard.orders["gradient", 1] = RuntimeError(beacon.SAID + "here")
    with pytest.raises(RuntimeError, match="injected by chaos: here"):
        Loop().train(1)
    assert heard.steps() == []


def test_an_evaluation_is_no_training(heard: Heard) -> None:
    loop = Loop()
    loop.model.eval()
    loop.model(torch.ones(4, 3))
    loop.model.train()
    with torch.no_grad():
        loop.model(torch.ones(4, 3))
    assert heard.points == [("forward", 1)]  # in training mode it might be training


def test_a_save_is_other_work_and_has_its_point(heard: Heard) -> None:
    loop = Loop()
    loop.train(1)
    with loop.watched.saving():
        loop.watched.written()
    loop.train(1)
    assert heard.order() == ["1", "checkpoint", "-", "2"]
    assert ("saving", 1) in heard.points


def test_the_output_of_a_model_that_returns_its_loss_is_enough(heard: Heard) -> None:
    class Model(torch.nn.Linear):
        def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            y = super().forward(batch)
            return {"logits": y, "loss": y.square().mean()}

    model = Model(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    (loss := model(torch.ones(4, 3))["loss"]).backward()
    optimizer.step()
    assert heard.losses() == [pytest.approx(loss.item())]
    assert heard.points == STEP


def test_without_points_no_parameter_has_a_hook(tmp_path: Path) -> None:
    with listening(tmp_path, points=False) as heard:
        loop = Loop()
        assert not any(p._backward_hooks for p in loop.model.parameters())
        loop.train(2)
        assert heard.steps() == [1, 2]


def test_what_is_closed_says_nothing_more(heard: Heard) -> None:
    loop = Loop()
    loop.watched.close()
    loop.model(torch.ones(4, 3)).sum().backward()
    loop.optimizer.step()
    assert heard.points == [] and heard.reports() == []


def test_no_framework_is_imported_with_the_package() -> None:
    code = (
        "import sys, chaos.integrations, chaos.integrations.plain, chaos.integrations.accelerate,"
        " chaos.integrations.deepspeed, chaos.integrations.torchtitan;"
        " names = {'torch', 'lightning', 'transformers', 'accelerate', 'deepspeed', 'torchtitan'};"
        " assert not names & set(sys.modules), names & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
