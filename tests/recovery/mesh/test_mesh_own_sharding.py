"""A model that ``parallelize`` has sharded itself, over a mesh of its own names, with activation
checkpointing, as torchtitan does: trained as one process trains it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.recovery.mesh.test_mesh_training import BATCH, STEPS, Part, plainly, train, whole
from tests.support.ranks import Self, results
from trainchaos.harness.workloads._parallel import PLAN
from trainchaos.harness.workloads._transformer import Transformer
from trainchaos.recovery.policy.mesh import Mesh

pytestmark = pytest.mark.real

NAMES = {
    "dp_replicate": "replicate",
    "fsdp": "shard",
    "pp": "pipeline",
    "cp": "context",
    "tp": "tensor",
}


def own_sharding(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """Also along a dimension with one place."""
    groups = [mesh.get_group(name) for name in NAMES.values()]
    own = DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=tuple(NAMES))
    blocks: Any = model.blocks
    for place, block in enumerate(blocks):
        if own["tp"].size() > 1:
            parallelize_module(block, own["tp"], PLAN, src_data_rank=None)
            block.heads //= own["tp"].size()
        blocks[place] = checkpoint_wrapper(block)
        fully_shard(blocks[place], mesh=own["fsdp"])
    return fully_shard(model, mesh=own["fsdp"])  # type: ignore[return-value]


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(shard=2),
        pytest.param(Mesh(tensor=2), marks=pytest.mark.long),
        pytest.param(Mesh(shard=2, tensor=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_it_trains_what_one_process_does(mesh: Mesh) -> None:
    found = results(partial(train, mesh, "-", cut=own_sharding), mesh.cells)
    state, losses, norms = plainly()
    for _, seen, waits in found:
        assert waits == 0
        assert [loss for loss, _, _ in seen] == pytest.approx(losses, rel=1e-5)
        assert [norm for _, norm, _ in seen] == pytest.approx(norms, rel=1e-5)
        assert [count for _, _, count in seen] == [BATCH] * STEPS
    made = whole(found, mesh.cells)
    assert list(made) == list(state)
    for name, tensor in state.items():
        if not name.endswith("qkv.bias"):  # of keys: a softmax takes no notice, but for rounding
            torch.testing.assert_close(made[name], tensor.to(made[name]), rtol=1e-4, atol=1e-4)


def along_context(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """Whose gradients torch would sum, before the job does."""
    parallelize_module(model.blocks[0], mesh["context"], PLAN, src_data_rank=None)
    return model


def refused_along_context(me: Self) -> str:
    with pytest.raises(RuntimeError) as told:
        Part(me, Mesh(context=2), cut=along_context)
    return str(told.value)


def test_a_parameter_along_context_is_refused() -> None:
    said = results(refused_along_context, 2)
    assert all(
        "parameter blocks.0.qkv.weight on a mesh with job.mesh['context']" in s for s in said
    )


def in_part(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """The rest would be trained by each rank alone."""
    fully_shard(model.blocks[1], mesh=mesh["shard"])
    return model


def refused(me: Self) -> str:
    with pytest.raises(RuntimeError) as told:
        Part(me, Mesh(shard=2), cut=in_part)
    return str(told.value)


def test_a_model_that_is_sharded_in_part_is_refused() -> None:
    said = results(refused, 2)
    assert all("tokens.weight is not spread over the ranks of job.mesh['shard']" in s for s in said)
