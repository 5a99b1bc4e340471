"""The callback in trainers of Lightning, under both of its names."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.chaos.integrations.heard import Heard, need

need("lightning", "pytorch_lightning")

from trainchaos.chaos.integrations.lightning import ChaosCallback  # noqa: E402

PASS = ["forward", "backward", "gradient"]
FOLD = [*PASS, "forward", "backward", "optimizer"]  # two batches that are one step


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> ModuleType:
    """A package of Lightning."""
    return importlib.import_module(request.param)


def fit(pl: ModuleType, folder: Path, last: Path | None = None, **options: Any) -> Any:
    """Train on batches of 4; returns the module."""

    class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Linear(3, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        default_root_dir=folder,
        callbacks=[
            ChaosCallback(),
            pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_last=True),
        ],
        **options,
    )
    data = torch.utils.data.DataLoader(torch.ones(16, 3), batch_size=4)
    trainer.fit(module, data, data, ckpt_path=last)
    return module


def test_steps_are_those_of_the_whole_run_also_after_resuming(
    pl: ModuleType, heard: Heard, tmp_path: Path
) -> None:
    fit(pl, tmp_path, max_steps=6)
    assert heard.steps() == [1, 2, 3, 4, 5, 6]
    assert {one.samples for one in heard.reports() if one.busy_s is None} == {4}
    assert all(loss is not None for loss in heard.losses())
    fit(pl, tmp_path, tmp_path / "last.ckpt", max_steps=8)
    assert heard.steps()[6:] == [7, 8]


def test_the_points_of_a_step_and_of_its_save(pl: ModuleType, heard: Heard, tmp_path: Path) -> None:
    fit(pl, tmp_path, max_steps=2)
    steps = [[(name, step) for name in [*PASS, "optimizer"]] for step in (1, 2)]
    assert heard.points == [*steps[0], *steps[1], ("saving", 2)] + [("saving", 2)] * (
        len(heard.points) - 9
    )
    assert heard.order()[:3] == ["1", "2", "checkpoint"]


def test_batches_that_are_summed_up_are_one_step(
    pl: ModuleType, heard: Heard, tmp_path: Path
) -> None:
    fit(pl, tmp_path, max_steps=2, accumulate_grad_batches=2)
    assert heard.steps() == [1, 2]
    assert [one.samples for one in heard.reports() if one.busy_s is None] == [8, 8]
    assert [name for name, step in heard.points if step == 1] == FOLD


def test_a_validation_is_other_work(pl: ModuleType, heard: Heard, tmp_path: Path) -> None:
    fit(pl, tmp_path, max_epochs=1, val_check_interval=4, max_steps=5)
    said = heard.order()
    assert said[said.index("evaluation") - 1] in ("4", "checkpoint")
    assert said[said.index("evaluation") + 1] == "-"


def test_gradients_are_nan_where_a_fault_says_so(
    pl: ModuleType, heard: Heard, tmp_path: Path
) -> None:
    heard.orders["gradient", 2] = "nan"
    module = fit(pl, tmp_path, max_steps=2)
    assert all(bool(p.isnan().all()) for p in module.parameters())
    assert [(what, step) for what, step, _, _ in heard.confirmed] == [("nan", 2)]
