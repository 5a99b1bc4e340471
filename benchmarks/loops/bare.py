"""One rank of a bare loop: DistributedDataParallel, or FSDP2's own mesh of replicas and shards; no
recovery, no logging. Prints its step times as JSON.

    python -m benchmarks.loops.bare FOLDER RANK WORLD STEPS CORPUS SHARDS
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainchaos.harness.launch.workload import BuildContext, Trainable
from trainchaos.harness.workloads.gpt import Gpt
from trainchaos.recovery.collectives.sharding import default_units
from trainchaos.recovery.data import order

BATCH = 16

Loss = Callable[[Sequence[int]], torch.Tensor]


def replicated(trainable: Trainable) -> Loss:
    """The loss goes through the wrapper, so that its hooks see the forward pass."""
    wrapped = DistributedDataParallel(trainable.model)

    def loss_of(ids: Sequence[int]) -> torch.Tensor:
        batch = trainable.load(ids)
        logits = wrapped(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return loss_of


def sharded(trainable: Trainable, world: int, shards: int) -> Loss:
    """Shard the model in place."""
    model = trainable.model
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicas", "shards"))
    for module in [*default_units(model), model]:
        fully_shard(module, mesh=mesh if world > shards else mesh["shards"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo only supports sums
    return lambda ids: trainable.loss(trainable.load(ids)) / len(ids)


def main() -> None:
    """Train, then end the process."""
    folder, corpus = sys.argv[1], Path(sys.argv[5])
    rank, world, steps, shards = (int(sys.argv[place]) for place in (2, 3, 4, 6))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    trainable = Gpt().build(BuildContext(data=corpus, device="cpu", seed=1, steps=steps))
    loss_of = replicated(trainable) if shards == 1 else sharded(trainable, world, shards)
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


if __name__ == "__main__":
    main()
