"""One rank of the bare sharded loop: FSDP2's own mesh of replicas and shards, no recovery, no
logging. Prints its step times as JSON.
"""

from __future__ import annotations

import sys

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.loops.bare import Loss, run
from trainchaos.harness.launch.workload import Trainable
from trainchaos.recovery.collectives.sharding import default_units


def wrap(trainable: Trainable, world: int) -> Loss:
    """Shard the model; the number of shards is one more argument."""
    model, shards = trainable.model, int(sys.argv[6])
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicas", "shards"))
    for module in [*default_units(model), model]:
        fully_shard(module, mesh=mesh if world > shards else mesh["shards"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo only supports sums
    return lambda ids: trainable.loss(trainable.load(ids)) / len(ids)


if __name__ == "__main__":
    run(wrap)
