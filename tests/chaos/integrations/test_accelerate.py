"""A loop with Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.chaos.integrations.heard import Heard, need

need("accelerate")

from accelerate import Accelerator  # noqa: E402

from trainchaos.chaos.integrations.accelerate import watch  # noqa: E402

PASS = ["forward", "backward", "gradient"]


def train(steps: int, *, summed: int, done: int = 0, save: Path | None = None) -> list[float]:
    """The losses of batches of 4; ``save``: after the last step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=summed)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.ones(4 * steps * summed, 3), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watched = watch(accelerator, model, optimizer, done=done)
    losses = []
    for batch in watched.batches(loader):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            watched.loss(loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        accelerator.save_state(str(save))
    return losses


def test_batches_that_are_summed_up_are_one_step(heard: Heard) -> None:
    losses = train(2, summed=2, done=10)
    assert heard.steps() == [11, 12]
    assert heard.losses() == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])
    assert [one.samples for one in heard.reports()] == [8, 8]
    assert {one.rank for one in heard.reports()} == {0}


def test_the_points_of_a_step_and_of_its_save(heard: Heard, tmp_path: Path) -> None:
    train(1, summed=1, save=tmp_path / "state")
    step = [(name, 1) for name in ["data", *PASS, "optimizer"]]
    assert heard.points == [*step, ("data", 2), ("saving", 1)]
    assert heard.order() == ["1", "checkpoint"]


def test_a_save_that_a_fault_ends_has_written_nothing(heard: Heard, tmp_path: Path) -> None:
    heard.orders["saving", 1] = RuntimeError("killed here")
    with pytest.raises(RuntimeError, match="killed here"):
        train(1, summed=1, save=tmp_path / "state")
    assert not any(path.is_file() for path in tmp_path.glob("state/**/*"))
