"""Trains torchtitan's llama3 debug model, cut up by its own ``parallelize_llama``, for 40 or the
given steps: ``python -m trainchaos.recovery.run --ranks 4 --mesh tensor=2 --spares 1 --fresh
examples/torchtitan/train_recoverable.py 40``.
"""

import sys
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import cross_entropy
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

from trainchaos import recovery

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
SAMPLES = 256
BATCH = 8  # sequences a step, over all ranks that compute different ones
LENGTH = 32
WAYS = ParallelismConfig(spmd_backend="partial_dtensor")
SPEC = model_registry("debugmodel")


def model_config():
    """The debug model's own, with the attention that a CPU can train: flex attention, the debug
    model's, has no backward pass there.
    """
    config = SPEC.model
    config.update_from_config(config=SimpleNamespace(parallelism=WAYS))  # how to shard each part
    for layer in config.layers:
        attention = layer.attention
        attention.rope = replace(attention.rope, max_seq_len=LENGTH)
        attention.inner_attention = ScaledDotProductAttention.Config(
            sharding_config=attention.inner_attention.sharding_config
        )
    return config


class JobDims(ParallelDims):
    """torchtitan's dimensions, over the groups of the job's mesh."""

    def __init__(self, mesh):
        self.of_job = mesh
        if mesh["context"].size() > 1:
            raise ValueError("context: this example does not cut its sequences into parts")
        shard, pipeline, tensor = (mesh[dim].size() for dim in ("shard", "pipeline", "tensor"))
        super().__init__(
            dp_replicate=1,  # how many replicas there are is the job's affair
            dp_shard=shard,
            cp=1,
            tp=tensor,
            pp=pipeline,
            ep=1,
            world_size=shard * pipeline * tensor,
            spmd_backend="partial_dtensor",
        )

    def build_mesh(self):
        """See ParallelDims."""
        mesh = self.of_job
        named = {"dp_replicate": "replicate", "fsdp": "shard", "pp": "pipeline", "tp": "tensor"}
        groups = [mesh.get_group(name) for name in named.values()]
        whole = DeviceMesh.from_group(
            # context, which is left out, has one place
            groups,
            mesh.device_type,
            mesh=mesh.mesh[..., 0, :],
            mesh_dim_names=tuple(named),
        )
        self._global_meshes = {"dense": whole}
        self._single_axis_meshes = {name: whole[name] for name in named}
        self._single_axis_meshes["cp"] = self._single_axis_meshes["ep"] = whole["dp_replicate"]
        return whole


def cut_up(model, mesh):
    """This rank's part, made in place as torchtitan's trainer does, without values at first."""
    whole = dict(values_of(model))
    SPEC.parallelize_fn(model.to("meta"), parallel_dims=JobDims(mesh), **options())
    fill(model, whole, mesh.device_type)
    return model


def options(**ways):
    """What torchtitan's functions get of its configuration; ``ways``: of its parallelism."""
    return {
        "training": TrainingConfig(mixed_precision_param="float32"),
        "parallelism": replace(WAYS, **ways),
        "compile_config": CompileConfig(enable=False),
        "ac_config": SelectiveAC.Config(),
        "dump_folder": "",
    }


def fill(model, whole, device):
    """Give a part without values those of the whole model, which each process has."""
    model.to_empty(device=device)
    for name, mine in values_of(model):
        if isinstance(mine, DTensor):
            mine.to_local().copy_(part_of(whole[name], mine))
        else:
            mine.copy_(whole[name])


def values_of(model):
    """Parameters and buffers, by their names without activation checkpointing."""
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        yield name.replace("_checkpoint_wrapped_module.", ""), value.detach()


def part_of(value, spread):
    """What this rank holds of ``value``, which is spread as ``spread`` is."""
    sizes, begins = compute_local_shape_and_global_offset(
        spread.shape, spread.device_mesh, spread.placements
    )
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        value = value.narrow(dim, begin, size)
    return value


def whole_model(seed):
    """The same in every process."""
    torch.manual_seed(seed)
    model = model_config().build()
    with torch.no_grad():
        model.init_weights()
    return model


def optimizer_of(parameters):
    """As the debug model's."""
    return torch.optim.AdamW(parameters, lr=8e-4)


def sequences():
    """Token sequences, each of which counts on in steps of its own."""
    generator = torch.Generator().manual_seed(7)
    first, stride = torch.randint(1, 2048, (2, SAMPLES, 1), generator=generator)
    return (first + stride % 7 * torch.arange(LENGTH + 1)) % 2048


def main():
    """Build, train, print."""
    tokens = sequences()
    job = recovery.join(samples=SAMPLES, steps=STEPS, global_batch=BATCH, checkpoint_dir="saved")
    model = whole_model(job.seed)
    job.attach(model, optimizer_of, clip_norm=1.0, parallelize=cut_up)
    while job.running():
        with job.step() as step:
            batch = tokens[step.samples]
            logits = model(batch[:, :-1])
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            step.backward(loss * len(step.samples))
            step.commit()
            if job.rank == 0 and step.number % 10 == 0:
                print(f"step {step.number} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
