"""DeepSpeed with ZeRO stage 1 under torchrun."""

from datetime import timedelta

import deepspeed
import torch
from common import BATCH, CHECKPOINTS, SAVE_EVERY, STEPS, batches, model

from trainchaos.chaos.integrations.deepspeed import watch

CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def main() -> None:
    deepspeed.init_distributed("gloo", timeout=timedelta(minutes=2))
    net = model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
    if (CHECKPOINTS / "latest").exists():
        engine.load_checkpoint(str(CHECKPOINTS))

    watch(engine)
    for batch in batches(engine.global_steps + 1, engine.global_rank):
        loss = torch.nn.functional.mse_loss(engine(batch["x"]), batch["labels"])
        engine.backward(loss)
        engine.step()
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(str(CHECKPOINTS))

    assert engine.global_steps == STEPS
    engine.destroy()


if __name__ == "__main__":
    main()
