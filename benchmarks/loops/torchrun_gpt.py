"""The peer of the recovery benchmark: the same gpt nano as a plain DDP script, for torchrun with
restarts.

Environment: DATA (the corpus), CHECKPOINT_DIR, STEPS, EVERY. One line a step; a checkpoint by rank
0 each EVERY steps, which every start loads. Nothing of ``recovery`` but the order of samples is
used.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainchaos.harness.launch.workload import BuildContext, Trainable
from trainchaos.harness.workloads.gpt import Gpt
from trainchaos.recovery.data import order

BATCH, BLOCK = 16, 64


def main() -> None:
    """Train from the newest checkpoint to the last step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    data, steps, every = (
        Path(os.environ["DATA"]),
        int(os.environ["STEPS"]),
        int(os.environ["EVERY"]),
    )
    checkpoint = Path(os.environ["CHECKPOINT_DIR"]) / "checkpoint.pt"
    built = Gpt().build(BuildContext(data=data, device="cpu", seed=1, steps=steps))
    done = _load(built, checkpoint)
    wrapped = DistributedDataParallel(built.model)
    samples = (data.stat().st_size - 1) // BLOCK
    part = order.share(rank, world, BATCH)
    for step in range(done + 1, steps + 1):
        batch = built.load(order.batch(step, BATCH, samples, 1)[part.start : part.stop])
        built.optimizer.zero_grad()
        logits = wrapped(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(built.model.parameters(), 1.0)
        built.optimizer.step()
        if built.scheduler is not None:
            built.scheduler.step()
        if rank == 0:
            print(f"step {step}/{steps} loss {loss.item():.6f}", flush=True)
            if step % every == 0:
                _save(built, checkpoint, step)
    dist.destroy_process_group()


def _load(built: Trainable, checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    saved = torch.load(checkpoint, weights_only=True)
    built.model.load_state_dict(saved["model"])
    built.optimizer.load_state_dict(saved["optimizer"])
    assert built.scheduler is not None
    built.scheduler.load_state_dict(saved["scheduler"])
    return int(saved["step"])


def _save(built: Trainable, checkpoint: Path, step: int) -> None:
    assert built.scheduler is not None
    model, optimizer = built.model.state_dict(), built.optimizer.state_dict()
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": built.scheduler.state_dict(),
        "step": step,
    }
    torch.save(state, checkpoint.with_suffix(".tmp"))
    checkpoint.with_suffix(".tmp").rename(checkpoint)


if __name__ == "__main__":
    main()
