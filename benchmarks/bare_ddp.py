"""One rank of the bare loop: DistributedDataParallel, no recovery, no logging. Prints its step
times as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.launch.workload import BuildContext
from harness.workloads.gpt import Gpt
from recovery.data import order

BATCH = 16


def main() -> None:
    """Arguments: folder for the rendezvous file, rank, world, steps, corpus."""
    folder, rank, world, steps, corpus = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainable = Gpt().build(BuildContext(data=corpus, device="cpu", seed=1, steps=steps))
    model, optimizer, scheduler = trainable.model, trainable.optimizer, trainable.scheduler
    wrapped = DistributedDataParallel(model)
    # The loss goes through the wrapper, so that its hooks see the forward pass.
    samples = (corpus.stat().st_size - 1) // 64
    part = order.share(rank, world, BATCH)
    times = []
    last = time.perf_counter()
    for step in range(1, steps + 1):
        ids = order.batch(step, BATCH, samples, 1)[part.start : part.stop]
        batch = trainable.load(ids)
        optimizer.zero_grad()
        logits = wrapped(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    print(json.dumps(times), flush=True)
    # Exit without destroying the gloo group, which could wait for peers that already exited.
    os._exit(0)


if __name__ == "__main__":
    main()
