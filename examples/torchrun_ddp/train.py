"""A plain DDP training script for torchrun: a small model, a checkpoint every few steps, one log
line a step.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("STEPS", "60"))
SAVE_EVERY = 10
CHECKPOINT = Path(os.environ.get("CHECKPOINT_DIR", ".")) / "checkpoint.pt"


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    ddp = DistributedDataParallel(model)

    for step in range(done + 1, STEPS + 1):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        time.sleep(0.04)  # as long as it takes to read a batch
        x = torch.randn(16, 64, generator=generator)
        y = x.sum(dim=1, keepdim=True).sin()
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step}/{STEPS} loss {mean.item():.6f}", flush=True)
            if step % SAVE_EVERY == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, CHECKPOINT.with_suffix(".tmp"))
                CHECKPOINT.with_suffix(".tmp").rename(CHECKPOINT)

    dist.barrier()  # no rank leaves while another one still saves
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
