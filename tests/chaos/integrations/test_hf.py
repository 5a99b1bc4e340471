"""The callback in the Trainer of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.integrations.heard import Heard, need

need("transformers", "accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from trainchaos.chaos.integrations.hf import ChaosCallback  # noqa: E402

PASS = ["forward", "backward", "gradient"]


class Model(torch.nn.Module):
    """Returns its loss; ``shares``: as models of transformers do that count tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.net(x)
        loss = torch.nn.functional.mse_loss(y, labels)
        if self.training:
            self.seen.append(loss.item())
        return {"loss": loss, "logits": y}


class Counting(Model):
    """Its loss is a share of the step's, as where models of transformers count tokens."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        y = self.net(x)
        total = torch.nn.functional.mse_loss(y, labels, reduction="sum")
        loss = total / (len(x) if num_items_in_batch is None else num_items_in_batch)
        if self.training:
            self.seen.append(loss.item())
        return {"loss": loss, "logits": y}


def fit(
    folder: Path,
    *,
    model: Model | None = None,
    resume: Any = None,
    more: tuple[TrainerCallback, ...] = (),
    **options: Any,
) -> Model:
    """Train on batches of 4; returns the model."""
    data = [{"x": torch.ones(3), "labels": torch.ones(1)}] * 16
    model = model or Model()
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder / "out"),
            "per_device_train_batch_size": 4,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_steps": 100,
            **options,
        }
    )
    callbacks = [*more, ChaosCallback()]
    Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
    ).train(resume_from_checkpoint=resume)
    return model


def test_steps_are_those_of_the_whole_run_also_after_resuming(heard: Heard, tmp_path: Path) -> None:
    model = fit(tmp_path, max_steps=6, save_strategy="steps", save_steps=3)
    assert heard.steps() == [1, 2, 3, 4, 5, 6]
    assert heard.losses() == pytest.approx(model.seen)
    assert {one.samples for one in heard.reports() if one.busy_s is None} == {4}
    fit(tmp_path, max_steps=8, resume=str(tmp_path / "out" / "checkpoint-6"))
    assert heard.steps()[6:] == [7, 8]


def test_the_points_of_a_step(heard: Heard, tmp_path: Path) -> None:
    fit(tmp_path, max_steps=2)
    assert heard.points == [(name, step) for step in (1, 2) for name in [*PASS, "optimizer"]]


def test_batches_that_are_summed_up_are_one_step(heard: Heard, tmp_path: Path) -> None:
    model = fit(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    assert heard.steps() == [1, 2]
    assert heard.losses() == pytest.approx([sum(model.seen[:2]) / 2, sum(model.seen[2:]) / 2])
    assert [one.samples for one in heard.reports()] == [8, 8]


def test_a_loss_that_is_a_share_of_the_step_is_summed(heard: Heard, tmp_path: Path) -> None:
    model = fit(tmp_path, model=Counting(), max_steps=1, gradient_accumulation_steps=2)
    assert heard.losses() == pytest.approx([sum(model.seen)])


def test_an_evaluation_and_a_save_are_other_work(heard: Heard, tmp_path: Path) -> None:
    fit(
        tmp_path,
        max_steps=3,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    both = ["evaluation", "checkpoint", "-"]  # the Trainer does both at the end, too
    assert heard.order() == ["1", "2", *both, "3", *both]


def test_the_point_of_a_save_is_in_its_midst(heard: Heard, tmp_path: Path) -> None:
    heard.orders["saving", 2] = RuntimeError("killed here")
    with pytest.raises(RuntimeError, match="killed here"):
        fit(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    written = {path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir()}
    assert "model.safetensors" in written and "optimizer.pt" in written
    assert "trainer_state.json" not in written


def test_a_checkpoint_from_before_the_callback_can_be_resumed_and_saved(
    heard: Heard, tmp_path: Path
) -> None:
    fit(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    state = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    text = json.loads(state.read_text())
    del text["stateful_callbacks"]["ChaosCallback"]
    state.write_text(json.dumps(text))
    fit(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, resume=str(state.parent))
    assert heard.steps() == [1, 2, 3, 4]


def test_gradients_are_nan_where_a_fault_says_so(heard: Heard, tmp_path: Path) -> None:
    heard.orders["gradient", 2] = "nan"
    model = fit(tmp_path, max_steps=2)
    assert all(bool(p.isnan().all()) for p in model.parameters())
    assert [(what, step) for what, step, _, _ in heard.confirmed] == [("nan", 2)]
