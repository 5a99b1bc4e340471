"""A loop with Hugging Face Accelerate; two batches make a step."""

from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from common import BATCH, CHECKPOINTS, SAVE_EVERY, Samples, model

from trainchaos.chaos.integrations.accelerate import watch

ACCUMULATED = 2


def main() -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATED,
        kwargs_handlers=[InitProcessGroupKwargs("gloo", timeout=timedelta(minutes=2))],
    )
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Samples(times=ACCUMULATED), batch_size=BATCH)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    saved = sorted(CHECKPOINTS.glob("step*[0-9]"))
    done = int(saved[-1].name.removeprefix("step")) if saved else 0
    if saved:
        accelerator.load_state(str(saved[-1]))

    watched = watch(accelerator, net, optimizer, done=done)
    rest = accelerator.skip_first_batches(loader, done * ACCUMULATED)
    for batch in watched.batches(rest):
        with accelerator.accumulate(net):
            loss = torch.nn.functional.mse_loss(net(batch["x"]), batch["labels"])
            accelerator.backward(loss)
            watched.loss(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and watched.done % SAVE_EVERY == 0:
            path = CHECKPOINTS / f"step{watched.done:04d}"
            accelerator.save_state(str(path.with_suffix(".new")))
            accelerator.wait_for_everyone()  # each rank has written its part
            if accelerator.is_main_process:
                path.with_suffix(".new").rename(path)

    accelerator.end_training()


if __name__ == "__main__":
    main()
