"""Hugging Face Trainer under torchrun."""

import torch
import torch.distributed as dist
from common import BATCH, CHECKPOINTS, SAVE_EVERY, STEPS, Samples, model
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from trainchaos.chaos.integrations.hf import ChaosCallback


class Net(torch.nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}


def main() -> None:
    trainer = Trainer(
        model=Net(),
        args=TrainingArguments(
            output_dir=str(CHECKPOINTS),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            save_steps=SAVE_EVERY,
            eval_strategy="steps",
            eval_steps=20,
            logging_steps=10,
            learning_rate=1e-3,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_timeout=120,
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Samples(),
        eval_dataset=torch.utils.data.Subset(Samples(), range(64)),
        callbacks=[ChaosCallback()],
    )
    last = get_last_checkpoint(str(CHECKPOINTS)) if CHECKPOINTS.exists() else None
    trainer.train(resume_from_checkpoint=last)
    if dist.is_initialized():  # else a thread of gloo may abort the process as Python ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
