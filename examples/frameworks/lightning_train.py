"""Lightning with its own launcher, which starts the other ranks from the first one."""

from datetime import timedelta

import torch
from common import BATCH, CHECKPOINTS, RANKS, SAVE_EVERY, STEPS, Samples, model
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from trainchaos.chaos.integrations.lightning import ChaosCallback


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch["x"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(minutes=2)),
        max_steps=STEPS,
        logger=False,
        enable_progress_bar=False,
        callbacks=[
            ModelCheckpoint(CHECKPOINTS, every_n_train_steps=SAVE_EVERY, save_last=True),
            ChaosCallback(),
        ],
    )
    loader = torch.utils.data.DataLoader(Samples(), batch_size=BATCH)
    last = CHECKPOINTS / "last.ckpt"
    trainer.fit(Module(), loader, ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    main()
