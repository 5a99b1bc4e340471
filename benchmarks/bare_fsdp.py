"""One rank of the bare sharded loop: FSDP2's own mesh of replicas and shards, no recovery, no
logging. Prints its step times as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from harness.launch.workload import BuildContext
from harness.workloads.gpt import Gpt
from recovery.collectives.sharding import default_units
from recovery.data import order

BATCH = 16


def main() -> None:
    """Arguments: folder for the rendezvous file, rank, world, steps, corpus, shards."""
    folder, rank, world, steps, corpus = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    shards = int(sys.argv[6])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainable = Gpt().build(BuildContext(data=corpus, device="cpu", seed=1, steps=steps))
    model = trainable.model
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicas", "shards"))
    for module in [*default_units(model), model]:
        fully_shard(module, mesh=mesh if world > shards else mesh["shards"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo only supports sums
    optimizer, scheduler = trainable.optimizer, trainable.scheduler
    samples = (corpus.stat().st_size - 1) // 64
    part = order.share(rank, world, BATCH)
    times = []
    last = time.perf_counter()
    for step in range(1, steps + 1):
        ids = order.batch(step, BATCH, samples, 1)[part.start : part.stop]
        loss = trainable.loss(trainable.load(ids)) / len(ids)
        optimizer.zero_grad()
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
