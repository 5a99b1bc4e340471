"""A plain DistributedDataParallel loop under torchrun, watched by chaos.integrations.plain."""

from datetime import timedelta

import torch
import torch.distributed as dist
from common import CHECKPOINTS, SAVE_EVERY, STEPS, batches, model
from torch.nn.parallel import DistributedDataParallel

from trainchaos.chaos.integrations.plain import watch


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    rank = dist.get_rank()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    path, done = CHECKPOINTS / "last.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    ddp = DistributedDataParallel(net)

    watched = watch(ddp, optimizer, done=done)
    for batch in watched.batches(batches(done + 1, rank)):
        loss = torch.nn.functional.mse_loss(ddp(batch["x"]), batch["labels"])
        loss.backward()
        watched.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and watched.done % SAVE_EVERY == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
            with watched.saving():
                path.parent.mkdir(exist_ok=True)
                torch.save(state | {"step": watched.done}, path.with_suffix(".new"))
                watched.written()
                path.with_suffix(".new").rename(path)

    assert watched.done == STEPS
    dist.barrier()  # no rank leaves while another one still saves
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
