"""torch.multiprocessing.spawn: no variable says which rank a process is, its process group does."""

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from common import CHECKPOINTS, RANKS, SAVE_EVERY, batches, model
from torch.nn.parallel import DistributedDataParallel

from trainchaos import beacon


def train(rank: int, port: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(minutes=2),
    )
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    path, done = CHECKPOINTS / "last.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    ddp = DistributedDataParallel(net)

    for step, batch in enumerate(batches(done + 1, rank), start=done + 1):
        loss = torch.nn.functional.mse_loss(ddp(batch["x"]), batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        beacon.step(step, loss=loss.item(), samples=len(batch["x"]))
        if rank == 0 and step % SAVE_EVERY == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            path.parent.mkdir(exist_ok=True)
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)

    dist.barrier()  # no rank leaves while another one still saves
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port,), nprocs=RANKS)
