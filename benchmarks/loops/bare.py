"""What one rank of a bare loop does whatever wraps its model: no recovery, no logging. Prints its
step times as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from trainchaos.harness.launch.workload import BuildContext, Trainable
from trainchaos.harness.workloads.gpt import Gpt
from trainchaos.recovery.data import order

BATCH = 16

Loss = Callable[[Sequence[int]], torch.Tensor]


def run(wrap: Callable[[Trainable, int], Loss]) -> None:
    """Train, then end the process. ``wrap``: given the workload and the world size, wraps the model
    and returns the mean loss of some samples. Arguments: folder for the rendezvous file, rank,
    world, steps, corpus; ``wrap`` may read more.
    """
    folder, rank, world, steps, corpus = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainable = Gpt().build(BuildContext(data=corpus, device="cpu", seed=1, steps=steps))
    loss_of = wrap(trainable, world)
    optimizer, scheduler = trainable.optimizer, trainable.scheduler
    samples = (corpus.stat().st_size - 1) // 64
    part = order.share(rank, world, BATCH)
    times = []
    last = time.perf_counter()
    for step in range(1, steps + 1):
        loss = loss_of(order.batch(step, BATCH, samples, 1)[part.start : part.stop])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable.model.parameters(), 1.0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    print(json.dumps(times), flush=True)
    # Exit without destroying the gloo group, which could wait for peers that already exited.
    os._exit(0)
